/* sharing.h: one payload for several uses of a tensor.
 *
 * A tensor that is used again is encoded again, and equal bytes drop the second payload, because the
 * version of a tensor does not see writes through .data, numpy or DLPack.  So at most one payload more
 * is alive than is kept.  On a device the comparison would have to wait, so there each use keeps a
 * payload of its own. */
#ifndef GRADCKPT_SHARING_H
#define GRADCKPT_SHARING_H

#include "engine/payload/payload.h"

/* The latest payloads, borrowed: a dying payload removes itself. */
void gck_sharing_remember(gck_payload *payload);
void gck_sharing_forget(gck_payload *payload);

/* 1 when the bytes of both are written and equal, 0, -1 with an exception. */
int gck_sharing_proof(gck_payload *a, gck_payload *b);

#endif
