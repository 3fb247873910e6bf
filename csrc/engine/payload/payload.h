/* payload.h: one encoded tensor as a Python object. */
#ifndef GRADCKPT_PAYLOAD_H
#define GRADCKPT_PAYLOAD_H

#include "gradckpt.h"
#include "torch/input.h"
#include "engine/state.h"
#include "engine/payload/batch.h"
#include "engine/payload/payload_bytes.h"

extern PyType_Spec gck_payload_spec;

typedef enum {
    GCK_FOR_USER,          /* gradckpt.codecs.encode(): not counted, never shared           */
    GCK_FOR_REGION,        /* may be shared with other regions                              */
    GCK_FOR_REGION_SAVED,  /* outer saved-tensor hooks see the bytes, and keep them         */
    GCK_FOR_REGION_READ,   /* the same, after the forward has read them: gck_payload_hand_over() */
    GCK_WITHOUT_HOLES = 8, /* beside one of these: what is restored may live long, so a codec that rounds drops
                              holes and overlaps; else it has the layout of the original */
} gck_payload_use;

/* New reference: a payload of the input, which has been judged.  place: where its bytes go, if no outer hooks see
 * them; NULL: they stay.  first: the result of gck_sharing_find(), or NULL.  When the bytes turn out to be equal, they
 * are dropped and the result is `first`, counted as shared.  dither: NULL rounds to nearest; with `first` its own noise
 * counts, also where it is too far away to be compared.  batch: where the work may be deferred, or NULL.  NULL without
 * an exception: *skip says why it stays as it is. */
PyObject *gck_payload_new(gck_state *state, const gck_codec *codec, gck_input *in, gck_payload *first,
                          const gck_dither *dither, int use, PyObject *place, gck_batch *batch, gck_skip_reason *skip);

/* From here on the saved-tensor hooks around the region have the bytes.  Reading them in the
 * forward would run those hooks, an enclosing region's recompute among them.  0 or -1. */
int gck_payload_hand_over(gck_payload *payload);

/* Record that it serves another argument of the same region. */
void gck_payload_again(gck_payload *payload);

/* The payload was made from a detached alias of x; from now on x itself finds it.  0 or -1. */
int gck_payload_adopt(gck_payload *payload, PyObject *x);

#endif
