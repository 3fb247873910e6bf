/* batch.h: codec work of one region that waits to be done together: on a device, one
 * launch for all of its tensors.
 *
 * Only work that cannot overflow waits, on contiguous tensors; the rest is done at once.
 * Until gck_batch_flush() the bytes of its payloads, or the values of its tensors, are not
 * there: no other code may read them.  Memory is looked at in the flush, not before: what
 * happens in between may run Python. */
#ifndef GRADCKPT_BATCH_H
#define GRADCKPT_BATCH_H

#include "gradckpt.h"
#include "engine/state.h"
#include "engine/payload/payload_bytes.h"

enum { GCK_BATCH = 16 };                 /* tensors; more are done in several parts */

typedef struct gck_batch {
    gck_state       *state;
    const gck_codec *codec;
    int              decode;             /* what all of them wait for                       */
    int              n;
    gck_payload     *payload[GCK_BATCH]; /* all owned:                                      */
    PyObject        *tensor[GCK_BATCH];  /* read or written                                 */
    void            *stream[GCK_BATCH];  /* on which its memory was taken: borrowed         */
    gck_arrays       arrays[GCK_BATCH];  /* the bytes of the payload; NULL: it has them     */
    gck_placed       placed[GCK_BATCH];  /* owned: where those with `near` are              */
    PyObject        *saved;              /* borrowed iterator: of ctx.saved_tensors; NULL: not a node */
    PyObject        *made;               /* owned dict: what payloads gave that serve two arguments, and the buffers of
                                            slices.h by their number; NULL: none */
    int              exact;              /* originals that are alive and unchanged are restored by their values */
} gck_batch;

/* Make it empty; the arrays stay as they are. */
static inline void gck_batch_begin(gck_batch *b, gck_state *state, int decode)
{
    b->state = state;
    b->codec = NULL;
    b->decode = decode;
    b->n = 0;
    b->saved = b->made = NULL;
    b->exact = 0;
}

/* 1 when this work may wait.  b NULL: 0. */
static inline int gck_batch_takes(const gck_batch *b, const gck_codec *codec, const gck_tensor *view)
{
    return b != NULL && view->strides == NULL && (b->decode || !codec->may_overflow);
}

/* 0, or -1 with an exception: the batch was full or of another codec, and failed.  Arrays that a place has brought are
 * let go in any case. */
int gck_batch_add(gck_batch *b, gck_payload *payload, PyObject *tensor, gck_arrays arrays, void *stream);

/* Do the work and empty the batch.  0 or -1 with an exception; 1: the codec overflowed. */
int gck_batch_flush(gck_batch *b);

/* Empty the batch without the work, when an exception is pending. */
void gck_batch_drop(gck_batch *b);

#endif
