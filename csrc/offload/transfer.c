/* transfer.c: a copy, as the link makes it. */
#include "offload/transfer.h"

#include "offload/store.h"
#include "offload/store_memory.h"

/* It fails where parts before it are queued: no event stands for those. */
static void lose(const gck_transfer *what)
{
    gck_event_lose(what->item->last);
    if (what->last != NULL) {
        gck_event_lose(what->last);
    }
}

int gck_transfer_queue(const gck_transfer *what, void *stream)
{
    gck_linked *on = what->on;
    gck_byte_store_item *item = what->item;
    char *host = (char *)gck_byte_store_memory(item) + what->from, *near = what->device;
    const int64_t offset = what->from + (item->past == NULL ? item->memory : 0);
    int status = GCK_OK;

    item->last = item->last != NULL ? item->last : gck_event_take(on);
    if (item->last == NULL) {
        return GCK_STORE_DEVICE;
    }
    for (int64_t at = 0, n; at < what->nbytes && status == GCK_OK; at += n) {
        n = GCK_STORE_CHUNK - (offset + at) % GCK_STORE_CHUNK;
        n = n < what->nbytes - at ? n : what->nbytes - at;
        status = what->out ? on->link->copy_out(on->index, stream, host + at, near + at, n)
                           : on->link->copy_in(on->index, stream, near + at, host + at, n);
        if (status != GCK_OK && at > 0) {
            lose(what);
        }
    }
    return gck_linked_said(on, status) == GCK_OK ? 0 : GCK_STORE_DEVICE;
}

int gck_transfer_end(gck_byte_store_item *item, void *stream)
{
    if (gck_event_record(item->last, stream) != GCK_OK) {
        return GCK_STORE_DEVICE;
    }
    gck_store_flies(item);
    return 0;
}
