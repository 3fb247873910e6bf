/* place.h: where the bytes of payloads live between forward and backward: the type _C.Place, and what payloads ask. */
#ifndef GRADCKPT_PLACE_H
#define GRADCKPT_PLACE_H

#include "engine/state.h"

extern PyType_Spec gck_place_spec;

/* Bytes at a place.  One that is all zero is at none; in a simulated step it has a place and no bytes. */
typedef struct {
    PyObject                   *place;           /* owned                          */
    struct gck_offloaded       *bytes;           /* owned: of a device; else NULL  */
    struct gck_byte_store_item *item;            /* owned: of the host             */
} gck_placed;

static inline int gck_is_placed(const gck_placed *placed) { return placed->place != NULL; }

/* Memory for so many bytes that work on this stream writes.  1; 0: they stay where torch's allocator puts them, which
 * is counted; -1 with an exception. */
int gck_placed_take(gck_state *state, PyObject *place, int64_t nbytes, int device, void *stream, gck_placed *placed);

/* So many may be taken and not written yet, so that one more finds room in a ring of no given size. */
int gck_place_most_unwritten(PyObject *place);

/* The same in a simulated step, where nothing is taken and nothing counted.  1 or 0. */
int gck_placed_take_simulated(PyObject *place, int64_t nbytes, gck_placed *placed);

/* 1 when nothing has to be moved to read them; 0, also at no place. */
int gck_placed_is_near(const gck_placed *placed);

/* New reference: the same bytes, for as long as they are brought. */
gck_placed gck_placed_again(const gck_placed *placed);

/* Where they are, between take and written, and between bring and let go. */
void *gck_placed_memory(const gck_placed *placed);

/* The work that writes them is queued, or done.  0 or -1. */
int gck_placed_written(gck_placed *placed, void *stream);

/* Have them for work on this stream.  1; 0: there is no room, so gck_placed_copy(); -1. */
int gck_placed_bring(gck_placed *placed, void *stream);

/* That work is queued, or done.  0 or -1. */
int gck_placed_let_go(gck_placed *placed, void *stream);

/* Copy some of them to other memory of their device.  0 or -1. */
int gck_placed_copy(gck_placed *placed, int64_t from, int64_t nbytes, void *to, void *stream);

/* They are not needed any more, but by who has brought them.  Runs no Python. */
void gck_placed_drop(gck_placed *placed);

/* *place: new reference to what offload= means, NULL: nothing.  0 or -1. */
int gck_place_of(gck_state *state, PyObject *offload, PyObject **place);

#endif
