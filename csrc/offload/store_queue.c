/* store_queue.c: a list with two ends. */
#include "offload/store_queue.h"

void gck_store_push(gck_store_queue *queue, gck_byte_store_item *item)
{
    item->next_job = NULL;
    *(queue->last != NULL ? &queue->last->next_job : &queue->first) = item;
    queue->last = item;
}

gck_byte_store_item *gck_store_pop(gck_store_queue *queue)
{
    gck_byte_store_item *item = queue->first;

    if (item != NULL && (queue->first = item->next_job) == NULL) {
        queue->last = NULL;
    }
    return item;
}
