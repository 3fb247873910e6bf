/* transfer.h: copies between a device and the memory of a store.  With the store's lock. */
#ifndef GRADCKPT_TRANSFER_H
#define GRADCKPT_TRANSFER_H

#include "offload/store_parts.h"

typedef struct {
    gck_linked          *on;
    gck_byte_store_item *item;
    gck_event           *last;           /* of the device's memory; NULL: it needs none              */
    int64_t              from, nbytes;   /* of the item                                              */
    void                *device;
    int                  out;            /* to the store; else from it                               */
} gck_transfer;

/* Queue it on this stream, in parts that are pinned as one.  The item gets its event first.  0 or a status. */
int gck_transfer_queue(const gck_transfer *what, void *stream);

/* What is queued on this stream is the item's last use of its memory.  0 or a status. */
int gck_transfer_end(gck_byte_store_item *item, void *stream);

#endif
