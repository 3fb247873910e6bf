/* ring.h: the part of a device's memory through which its payloads leave and come back. */
#ifndef GRADCKPT_RING_H
#define GRADCKPT_RING_H

#include "offload/ranges.h"

enum {
    GCK_RING_UNIT = 256,         /* bytes: its parts are multiples, as torch's blocks             */
    GCK_RING_SEGMENTS = 64,
};

/* One that is all zero has no memory; ranges.edge is the caller's. */
typedef struct {
    gck_ranges ranges;
    char      *segments[GCK_RING_SEGMENTS];
    int        n;
    int64_t    nbytes, largest;                   /* bytes of all; of one segment                  */
    int64_t    taken, peak;
} gck_ring;

static inline int64_t gck_ring_size(int64_t nbytes)
{
    return (nbytes + GCK_RING_UNIT - 1) / GCK_RING_UNIT * GCK_RING_UNIT;
}

/* How much larger it should be for so many payloads of so many bytes, in one segment that holds such a payload; 0: it
 * is large enough, or cannot be larger. */
int64_t gck_ring_wants(const gck_ring *ring, int64_t nbytes, int payloads);

/* Make it larger by this memory, which work before `last` (owned) may still use.  0 or -1. */
int gck_ring_add(gck_ring *ring, void *memory, int64_t nbytes, gck_event *last);

/* A part of it for work on this stream: its offset; -1: it has no room; -2: the stream cannot wait. */
int64_t gck_ring_take(gck_ring *ring, int64_t size, void *stream);

/* Give it back, after `last` (owned). */
void gck_ring_give(gck_ring *ring, int64_t offset, int64_t size, gck_event *last);

void *gck_ring_memory(const gck_ring *ring, int64_t offset);

/* Wait for all that uses it, and free what it is made of. */
void gck_ring_clear(gck_ring *ring);

#endif
