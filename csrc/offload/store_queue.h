/* store_queue.h: items that wait for a thread of the store. */
#ifndef GRADCKPT_STORE_QUEUE_H
#define GRADCKPT_STORE_QUEUE_H

#include "offload/store_parts.h"

void gck_store_push(gck_store_queue *queue, gck_byte_store_item *item);

/* Borrowed: the first, taken out; NULL: none. */
gck_byte_store_item *gck_store_pop(gck_store_queue *queue);

#endif
