/* ring.c: segments of memory, whose parts are taken and given. */
#include "offload/ring.h"

enum { SEGMENT_BITS = 44 };      /* offsets: a segment, and bytes in it */

int64_t gck_ring_wants(const gck_ring *ring, int64_t nbytes, int payloads)
{
    const int64_t size = gck_ring_size(nbytes), missing = size * payloads - ring->nbytes;
    /* sizes may creep up: not a segment for each */
    const int64_t least = ring->n == 0 ? 0 : ring->largest < size ? gck_ring_size(size + size / 4) : size;

    if (ring->n == GCK_RING_SEGMENTS || (missing <= 0 && ring->largest >= size)) {
        return 0;
    }
    return missing > least ? missing : least;
}

int gck_ring_add(gck_ring *ring, void *memory, int64_t nbytes, gck_event *last)
{
    const int64_t offset = (int64_t)ring->n << SEGMENT_BITS;

    if (ring->n == GCK_RING_SEGMENTS
        || gck_ranges_add(&ring->ranges, offset, nbytes / GCK_RING_UNIT * GCK_RING_UNIT, last) < 0) {
        gck_event_give(last);
        return -1;
    }
    ring->segments[ring->n++] = memory;
    ring->nbytes += nbytes;
    ring->largest = nbytes > ring->largest ? nbytes : ring->largest;
    return 0;
}

int64_t gck_ring_take(gck_ring *ring, int64_t size, void *stream)
{
    int status;
    const int64_t offset = gck_ranges_take(&ring->ranges, size, &stream, &status);

    ring->taken += offset >= 0 ? size : 0;
    ring->peak = ring->taken > ring->peak ? ring->taken : ring->peak;
    return offset;
}

void gck_ring_give(gck_ring *ring, int64_t offset, int64_t size, gck_event *last)
{
    ring->taken -= size;
    gck_ranges_give(&ring->ranges, offset, size, last);
}

void *gck_ring_memory(const gck_ring *ring, int64_t offset)
{
    return ring->segments[offset >> SEGMENT_BITS] + (offset & (((int64_t)1 << SEGMENT_BITS) - 1));
}

void gck_ring_clear(gck_ring *ring)
{
    gck_ranges_finish(&ring->ranges);
    gck_ranges_clear(&ring->ranges);
}
