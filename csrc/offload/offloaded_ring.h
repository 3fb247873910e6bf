/* offloaded_ring.h: parts of the ring that bytes have.  The caller holds the store's lock. */
#ifndef GRADCKPT_OFFLOADED_RING_H
#define GRADCKPT_OFFLOADED_RING_H

#include "offload/offloader_parts.h"

/* Give them a part for work on this stream.  0; GCK_STORE_RING; GCK_STORE_DEVICE. */
int gck_offloaded_take_ring(gck_offloaded *bytes, void *stream);

/* Everything on this stream up to now may use it.  0 or a status. */
int gck_offloaded_used_by(gck_offloaded *bytes, void *stream);

/* Give it back, after that. */
void gck_offloaded_leave_ring(gck_offloaded *bytes);

/* Free the part of some that the store has, too: the oldest, which are read last.  ahead: copied in, and not read
 * yet; else read, and perhaps read once more.  1, or 0: there are none. */
int gck_offloader_evict(gck_offloader *offloader, int ahead);

#endif
