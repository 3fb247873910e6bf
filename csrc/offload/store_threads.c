/* store_threads.c: threads that move bytes between the memory of a store and its file. */
#include "offload/store_threads.h"

#include "offload/store_memory.h"

#include <time.h>

static void wrote(gck_byte_store_item *item, int status)
{
    gck_byte_store *store = item->store;

    if (status == 0) {
        item->at = GCK_COPIED;
        store->figures.written += item->padded;
        return;
    }
    store->figures.write_error = status;
    gck_space_give(&store->file_space, item->file, item->padded);
    item->file = -1;
    item->at = GCK_HERE;
    store->dirty += item->padded;
}

static void has_read(gck_byte_store_item *item, int status)
{
    item->error = status;
    item->at = status == 0 ? GCK_COPIED : GCK_AWAY;
    item->store->figures.read += status == 0 ? item->padded : 0;
    if (status != 0) {
        gck_store_give(item);
    }
}

static int64_t now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void move(gck_byte_store_item *item)
{
    gck_byte_store *store = item->store;
    const int writes = item->at == GCK_WRITING;
    gck_store_span *span = writes ? &store->writing : &store->reading;
    char *bytes = store->memory + item->memory;
    int status;

    span->since = span->threads++ == 0 ? now() : span->since;
    pthread_mutex_unlock(&store->lock);
    if (writes) {
        item->digest = gck_file_digest(bytes, item->padded);
        status = gck_file_write(&store->file, bytes, item->padded, item->file);
    } else {
        status = gck_file_read_checked(&store->file, bytes, item->padded, item->file, item->digest);
    }
    pthread_mutex_lock(&store->lock);
    if (--span->threads == 0) {
        *(writes ? &store->figures.write_ns : &store->figures.read_ns) += now() - span->since;
    }
    (writes ? wrote : has_read)(item, status);
    pthread_cond_broadcast(&store->done);
    gck_store_free_if_dropped(item);
}

void *gck_store_run(void *argument)
{
    gck_byte_store *store = argument;

    pthread_mutex_lock(&store->lock);
    for (;;) {
        gck_byte_store_item *item = gck_store_pop(&store->reads);      /* someone may wait for it */
        item = item != NULL ? item : gck_store_pop(&store->writes);
        if (item != NULL && item->dropped) {     /* its bytes are not wanted any more */
            item->at = item->at == GCK_WRITING ? GCK_COPIED : GCK_AWAY;
            gck_store_free_if_dropped(item);
        } else if (item != NULL) {
            move(item);
        } else if (store->ending) {
            break;
        } else {
            pthread_cond_wait(&store->work, &store->lock);
        }
    }
    pthread_mutex_unlock(&store->lock);
    return NULL;
}
