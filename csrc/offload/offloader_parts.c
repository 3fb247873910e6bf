/* offloader_parts.c: parts of the ring that bytes have. */
#include "offload/offloader_parts.h"

int gck_offloaded_used_by(gck_offloaded *b, void *stream)
{
    return gck_event_record(b->last, stream) == GCK_OK ? 0 : GCK_STORE_DEVICE;
}

void gck_offloaded_leave_ring(gck_offloaded *b)
{
    gck_offloader *o = b->offloader;
    gck_event *last = b->last;

    b->last = NULL;
    if (b->ring >= 0) {
        o->figures.ring_lost += last->lost ? b->size : 0;
        gck_ring_give(&o->ring, b->ring, b->size, last);
    } else {
        gck_event_give(last);
    }
    b->ring = -1;
}

int gck_offloader_evict(gck_offloader *o, int ahead)
{
    for (gck_offloaded *b = o->oldest; b != NULL; b = b->newer) {
        if (b->ring >= 0 && b->copied && b->readers == 0 && b->ahead == ahead) {
            gck_offloaded_leave_ring(b);
            return 1;
        }
    }
    return 0;
}

int gck_offloaded_take_ring(gck_offloaded *b, void *stream)
{
    gck_offloader *o = b->offloader;
    int64_t at;

    b->last = b->last != NULL ? b->last : gck_event_take(&o->on);
    if (b->last == NULL) {                       /* before work is queued, which it could not stand for */
        return GCK_STORE_DEVICE;
    }
    at = gck_ring_take(&o->ring, b->size, stream);
    b->ring = at < 0 ? -1 : at;
    return at == -2 ? GCK_STORE_DEVICE : at < 0 ? GCK_STORE_RING : 0;
}
