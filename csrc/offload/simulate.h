/* simulate.h: the time of a training step whose payloads are offloaded, by discrete events.
 *
 * A device has a compute stream, a queue of copies out and a queue of copies in, which work at the same time.  The
 * host runs ahead: it queues the whole step at once, so that its decisions depend on bytes, not on times.  A region
 * moves if it is placed, and has bytes, but no more than the ring; the payloads of others stay on the device.
 *
 *     forward   In order: a region that moves takes a range of the ring on the compute stream.  It is encoded there,
 *               and its forward runs.
 *     held      After each encode, while the payloads whose copy out is not issued have more bytes than may be held,
 *               the copy of the oldest is issued.  It starts when the payload is encoded.  Those that are still held
 *               when the backward begins are never copied: they are decoded where they are.
 *     release   A range is free after its last use: the copy out, or the decode.  Who takes a range waits for
 *               releases in the order in which those uses were queued, until there is room.  If all of them are too
 *               few, the copy of the oldest held payload is issued.  Space is bytes: nothing is fragmented.
 *     backward  In reverse order: a payload is decoded when it is in the ring, and the backward of its region runs.
 *     in        A payload that was copied out comes in before its decode, which waits for it.  The copy in starts
 *               when the copy out is done and its range is free; the queue of copies in waits for both.  Copies in are
 *               queued in the order of the decodes.
 *
 * How many payloads are prefetched is no number of this simulation: a host that queues a copy in some decodes earlier
 * queues the same copies in the same order behind the same releases, and each starts at the same time.
 *
 * The payloads of regions that do not move are encoded and decoded on the compute stream, too. */
#ifndef GRADCKPT_SIMULATE_H
#define GRADCKPT_SIMULATE_H

#include "gradckpt.h"

enum { GCK_MOST_OFFLOAD_REGIONS = 1 << 20 };

/* Nanoseconds, and bytes of the payload.  A recompute's forward is part of `backward`. */
typedef struct {
    int64_t forward, backward, encode, decode, bytes, placed;
} gck_offload_region;

typedef struct {
    const gck_offload_region *regions;
    int64_t n;
    int64_t rate_out, rate_in;   /* bytes a second                                             */
    int64_t latency;             /* ns of each copy                                            */
    int64_t ring, held;          /* bytes                                                      */
    int64_t head;                /* ns between forward and backward                            */
} gck_offload_step;

typedef struct {
    int64_t time;                /* ns, from the first encode to the end of the last backward  */
    int64_t exposed_forward;     /* ns for which the compute stream waited for room            */
    int64_t exposed_backward;    /* and for payloads; without both the step takes the rest     */
    int64_t stalls;              /* how often it waited                                        */
    int64_t copies, moved;       /* payloads and bytes that went out; as many came back        */
    int64_t stayed;              /* regions that do not move                                   */
    int64_t peak;                /* bytes of the ring in use at a time                         */
} gck_offload_time;

/* GCK_OK; GCK_E_RANGE: a number is negative, a rate is 0, `placed` is not 0 or 1, there are too many regions, or
 * the sum of all times or bytes reaches 2**60; GCK_E_MEMORY. */
int gck_simulate_offload(const gck_offload_step *step, gck_offload_time *found);

#endif
