/* payload.h: one encoded tensor as a Python object. */
#ifndef GRADCKPT_PAYLOAD_H
#define GRADCKPT_PAYLOAD_H

#include "batch.h"
#include "state.h"

extern PyType_Spec gck_payload_spec;

typedef enum {
    GCK_FOR_USER,            /* gradckpt.encode(): not counted, never shared                  */
    GCK_FOR_REGION,          /* may be shared with other regions                              */
    GCK_FOR_REGION_SAVED,    /* outer saved-tensor hooks get to see the bytes, and keep them  */
} gck_payload_use;

/* For payload.c and pending.c. */
struct gck_payload {
    PyObject_HEAD
    PyObject        *weakrefs;
    gck_state       *state;        /* borrowed: the type keeps the module alive          */
    const gck_codec *codec;
    PyObject        *buffer;       /* uint8 tensor; NULL when `saved` has it             */
    PyObject        *saved;        /* torch's SavedTensor of the buffer; else NULL       */
    PyObject        *dtype, *device, *shape;
    PyObject        *original;     /* weak reference                                     */
    PyObject        *version;      /* of the original then; NULL: inference tensor, never shared */
    const void      *data;         /* its memory then: compared, never followed          */
    int64_t          nbytes, bytes_in;
    const gck_batch *waits;        /* for its bytes, in this batch; else NULL            */
    int              requires_grad, leaf;
    int              stochastic;   /* rounded so                                         */
    int              counted;      /* in stats()                                         */
    int              ndim;
    int64_t         *sizes;        /* ndim sizes, then ndim strides; malloc              */
    int              strided;      /* the strides are meant                              */
    int              device_index; /* -1: CPU                                            */
    void            *stream;       /* that wrote the bytes                               */
    /* See pending.h. */
    uint32_t        *verdict;      /* not NULL: open, and this is in state->pending      */
    uint32_t         late;         /* tests: what the device would write                 */
    int              refused;      /* buffer and saved may be NULL then                  */
    PyObject        *kept;         /* the original itself, while open and when refused   */
    gck_payload     *next_pending;
    int64_t          epoch;        /* of the counters below: reset_stats() begins a new one */
    int              uses, fresh;  /* regions that use it; it was encoded in this epoch  */
};

/* 1 when the values fill their memory without holes or overlaps: such strides are kept. */
int gck_is_dense(const gck_tensor *x);

/* New reference: the payload of x, whose view was taken just now.  dither: NULL rounds to
 * nearest.  batch: where the work may wait, or NULL.  NULL with *fits = 0 and no exception:
 * the codec cannot hold these values. */
PyObject *gck_payload_new(gck_state *state, const gck_codec *codec, PyObject *x, const gck_tensor *view,
                          const gck_dither *dither, gck_payload_use use, gck_batch *batch, int *fits);

/* New reference to a payload of this very tensor, unchanged since, rounded as asked; NULL
 * without an exception when there is none.  Of payloads that wait, only those in `batch`. */
PyObject *gck_payload_find(gck_state *state, const gck_codec *codec, PyObject *x, const gck_tensor *view,
                           int stochastic, const gck_batch *batch);

/* For batch.c: its bytes are not there yet; they are now, or (`done` 0) never will be. */
void gck_payload_wait(gck_payload *payload, const gck_batch *batch);
void gck_payload_arrived(gck_payload *payload, int done);

/* The payload was made from a detached alias of x: views of x and x itself may find it.  0 or -1. */
int gck_payload_adopt(gck_payload *payload, PyObject *x);

/* New reference: a fresh tensor of the shape, dtype, strides and device of the original. */
PyObject *gck_payload_decode(gck_payload *payload);

/* The same, counted as a restore, requiring grad when the original did.  Its values may wait in `batch`. */
PyObject *gck_payload_restore(gck_payload *payload, gck_batch *batch);

/* The same for a saved tensor, of which autograd knows the history: none here. */
PyObject *gck_payload_revive(gck_payload *payload);

/* In stats(): so many bytes more are alive. */
void gck_count_live(gck_state *state, int64_t nbytes);

/* gradckpt.encode(x, codec, (seed, step, tensor) or None). */
PyObject *gck_encode_py(PyObject *module, PyObject *args);

#endif
