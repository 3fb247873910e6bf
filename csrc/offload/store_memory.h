/* store_memory.h: the memory of a store, and what leaves it.  All with its lock. */
#ifndef GRADCKPT_STORE_ROOM_H
#define GRADCKPT_STORE_ROOM_H

#include "offload/store_parts.h"

/* Take memory for it, for work on *stream (NULL: the host's), but not that of any from `end` on (NULL: of any).  0; -1:
 * only what is being moved could give some; -2: nothing could; or a device's status. */
int gck_store_take(gck_byte_store *store, gck_byte_store_item *item, const gck_byte_store_item *end,
                   void *const *stream);

/* Its memory is pinned by this device, if no other one does it: what it has now, and what it will have. */
void gck_store_pin_for(gck_byte_store *store, const gck_linked *device);

/* Give its memory back, after the device's last use of it. */
void gck_store_give(gck_byte_store_item *item);

/* Have the oldest written that are in memory alone, until so many bytes may stay so. */
void gck_store_write_down_to(gck_byte_store *store, int64_t most);

/* Free it if it was dropped and no thread and no device has it. */
void gck_store_free_if_dropped(gck_byte_store_item *item);

/* It is not held any more by one caller. */
void gck_store_release(gck_byte_store_item *item);

/* A device was given work that reads or writes its memory: item->last was recorded after it. */
void gck_store_flies(gck_byte_store_item *item);

/* Those of which the device is done are here. */
void gck_store_poll(gck_byte_store *store);

/* Wait until something moved: without the lock meanwhile.  What a device refuses to wait for is lost (event.h). */
void gck_store_await(gck_byte_store *store);

/* Wait for all that devices do with its memory, and until no item has an event of this one: its items were dropped. */
void gck_store_settle(gck_byte_store *store, const gck_linked *on);

#endif
