/* sharing.h: one payload for several uses of a tensor.
 *
 * A tensor that is used again is encoded again, and equal bytes drop the second payload, because
 * the version of a tensor does not see writes through .data, numpy or DLPack.  So at most one
 * payload more is alive than is kept.  On a device the comparison is queued, and its answer comes later
 * (payload_overflow.h). */
#ifndef GRADCKPT_SHARING_H
#define GRADCKPT_SHARING_H

#include "gradckpt.h"
#include "torch/input.h"
#include "engine/state.h"
#include "engine/payload/batch.h"
#include "engine/payload/payload_bytes.h"

/* New reference: a payload of this same tensor, rounded and with a layout (layout.h) as requested, that
 * seems to hold its present values; NULL when none exists, or with an exception.  The version does not prove it
 * (writes through .data, numpy or DLPack leave no trace); gck_payload_new() does.  A payload that
 * is pending in `batch` is finished first.  The input has been judged. */
gck_payload *gck_sharing_find(gck_state *state, const gck_codec *codec, gck_input *in, int stochastic, int exact,
                              gck_batch *batch);

/* 1 when the bytes of both are written and equal, 0, -1 with an exception. */
int gck_sharing_proof(gck_payload *a, gck_payload *b);

/* 1 when encoding the input again gives the bytes of `first`, faster than with a payload: small ones
 * on the CPU only; 0: they differ, or it is another case; -1. */
int gck_sharing_holds(gck_payload *first, gck_input *in);

#endif
