/* store_memory.c: the memory of a store, and what leaves it. */
#include "offload/store_memory.h"


#include <stdlib.h>

enum { GROW = 64 << 20 };        /* the file: bytes */

/* ---- memory ---- */

/* Pin its next bytes, if a device is there.  After a refusal the rest is not pinned: copies are slower. */
static void pin(gck_byte_store *store, int64_t from, int64_t nbytes)
{
    gck_linked *pins = &store->pins;

    for (int64_t at = from, n; at < from + nbytes && pins->link != NULL && store->figures.pinned == at; at += n) {
        n = from + nbytes - at < GCK_STORE_CHUNK ? from + nbytes - at : GCK_STORE_CHUNK;
        if (gck_linked_said(pins, pins->link->pin(pins->index, store->memory + at, n)) == GCK_OK) {
            store->figures.pinned += n;
            store->figures.pin_calls++;
        } else {
            store->pins_refused = 1;
        }
    }
}

void gck_store_pin_for(gck_byte_store *store, const gck_linked *device)
{
    if (store->pins.link == NULL) {
        store->pins = *device;
        pin(store, 0, store->ranges.space.size);
    }
}

/* Use more of it, for a part of so many bytes.  0, or -1: there is none. */
static int grow(gck_byte_store *store, int64_t nbytes)
{
    const int64_t size = store->ranges.space.size, most = store->figures.memory - size;
    const int64_t chunks = (nbytes + GCK_STORE_CHUNK - 1) / GCK_STORE_CHUNK * GCK_STORE_CHUNK;
    const int64_t more = chunks < most ? chunks : most;

    if (more <= 0 || gck_ranges_add(&store->ranges, size, more, NULL) < 0) {
        return -1;
    }
    pin(store, size, more);
    store->figures.memory_taken = size + more;
    return 0;
}

/* May a device read its bytes past the store's memory for ever? */
static int is_lost(const gck_byte_store_item *item)
{
    return item->past != NULL && item->last != NULL && item->last->lost;
}

void gck_store_give(gck_byte_store_item *item)
{
    const int elsewhere = item->in_flight || is_lost(item);    /* a device has its bytes past the store's memory */
    gck_event *last = elsewhere ? NULL : item->last;

    item->last = elsewhere ? item->last : NULL;
    if (item->memory >= 0) {
        gck_ranges_give(&item->store->ranges, item->memory, item->padded, last);
    } else {
        gck_event_give(last);
    }
    item->memory = -1;
}

/* Does a thread or a device have it? */
static int is_moving(const gck_byte_store_item *item)
{
    return item->in_flight || item->at == GCK_WRITING || item->at == GCK_READING;
}

/* Free the memory of the oldest of which the file has a copy, but of none from `end` on.  1, or 0: there is none. */
static int evict(gck_byte_store *store, const gck_byte_store_item *end)
{
    for (gck_byte_store_item *item = store->oldest; item != NULL && item != end; item = item->newer) {
        if (item->at == GCK_COPIED && item->holds == 0 && !item->in_flight) {
            gck_store_give(item);
            item->at = GCK_AWAY;
            return 1;
        }
    }
    return 0;
}

/* Will memory for `wanted` be given without a call of this thread?  Who reserves on the host fills and holds nothing
 * else; who reads may hold several. */
static int something_moves(const gck_byte_store *store, const gck_byte_store_item *wanted)
{
    const gck_byte_store_item *item = store->oldest;
    const int reserves = wanted->at == GCK_FILLING && !wanted->of_device;

    while (item != NULL
           && !(item->memory >= 0
                && (is_moving(item)
                    || (reserves && (item->holds > 0 || (item->at == GCK_FILLING && !item->of_device)))))) {
        item = item->newer;
    }
    return item != NULL || gck_ranges_wait(&store->ranges);
}

int gck_store_take(gck_byte_store *store, gck_byte_store_item *item, const gck_byte_store_item *end,
                   void *const *stream)
{
    int status;

    for (;;) {
        item->memory = gck_ranges_take(&store->ranges, item->padded, stream, &status);
        if (item->memory == -2) {
            item->memory = -1;
            return GCK_STORE_DEVICE;
        }
        if (item->memory >= 0) {
            break;
        }
        if (grow(store, item->padded) < 0 && !evict(store, end)) {
            return something_moves(store, item) ? -1 : -2;
        }
    }
    if (store->ranges.space.used > store->figures.memory_peak) {
        store->figures.memory_peak = store->ranges.space.used;
    }
    return 0;
}

/* ---- the file ---- */

/* Take room in it, which grows.  0 or -1. */
static int take_file(gck_byte_store *store, gck_byte_store_item *item)
{
    item->file = item->file < 0 ? gck_space_take_more(&store->file_space, item->padded, GROW) : item->file;
    if (store->file_space.used > store->figures.file_peak) {
        store->figures.file_peak = store->file_space.used;
    }
    return item->file < 0 ? -1 : 0;
}

void gck_store_write_down_to(gck_byte_store *store, int64_t most)
{
    for (gck_byte_store_item *item = store->oldest;
         item != NULL && store->dirty > most && gck_store_has_file(store); item = item->newer) {
        if (item->at == GCK_HERE && !item->dropped && store->figures.write_error == 0) {
            if (take_file(store, item) < 0) {    /* no memory now, which is no error of the file */
                return;
            }
            item->at = GCK_WRITING;
            store->dirty -= item->padded;
            gck_store_push(&store->writes, item);
            pthread_cond_signal(&store->work);
        }
    }
}

/* ---- items ---- */

static void free_item(gck_byte_store_item *item)
{
    gck_byte_store *store = item->store;
    const int lost = is_lost(item);

    *(item->older != NULL ? &item->older->newer : &store->oldest) = item->newer;
    *(item->newer != NULL ? &item->newer->older : &store->newest) = item->older;
    store->dirty -= item->at == GCK_HERE ? item->padded : 0;
    gck_store_give(item);
    gck_event_give(item->last);
    if (item->file >= 0) {
        gck_space_give(&store->file_space, item->file, item->padded);
    }
    if (lost) {
        item->next_job = store->lost;
        store->lost = item;
    } else {
        free(item->past);
        free(item);
    }
    pthread_cond_broadcast(&store->done);
}

/* Free its bytes past the store's memory if no caller and no device has them. */
static void free_past(gck_byte_store_item *item)
{
    if (item->holds == 0 && !item->in_flight && !is_lost(item)) {
        free(item->past);
        item->past = NULL;
    }
}

void gck_store_free_if_dropped(gck_byte_store_item *item)
{
    if (item->dropped && item->holds == 0 && !is_moving(item)) {
        free_item(item);
    }
}

void gck_store_release(gck_byte_store_item *item)
{
    gck_byte_store *store = item->store;

    if (--item->holds == 0) {
        free_past(item);
        pthread_cond_broadcast(&store->done);
    }
    gck_store_free_if_dropped(item);
}

void gck_store_flies(gck_byte_store_item *item)
{
    gck_byte_store *store = item->store;

    if (item->of_graph) {
        return;
    }
    if (!gck_store_has_file(store)) {            /* who takes its memory waits for item->last */
        item->at = GCK_HERE;
        return;
    }
    if (!item->in_flight) {
        item->in_flight = 1;
        item->next_flight = NULL;
        *(store->last_flight != NULL ? &store->last_flight->next_flight : &store->flights) = item;
        store->last_flight = item;
    }
}

/* The first of those in flight is here. */
static void land(gck_byte_store *store)
{
    gck_byte_store_item *item = store->flights;

    store->flights = item->next_flight;
    store->last_flight = store->flights != NULL ? store->last_flight : NULL;
    item->in_flight = 0;
    if (item->at == GCK_FILLING && !item->last->lost) {
        item->at = GCK_HERE;
        store->dirty += item->padded;
    }
    free_past(item);
    pthread_cond_broadcast(&store->done);
    gck_store_free_if_dropped(item);
}

void gck_store_poll(gck_byte_store *store)
{
    while (store->flights != NULL && GCK_EDGE(GCK_EDGE_LANDED, store->flights->last->lost
                                                               || gck_event_is_done(store->flights->last), 1)) {
        land(store);
    }
}

/* Wait for an event without the lock.  Others may use it meanwhile, so it is only read, before. */
static void finish_without_lock(gck_byte_store *store, gck_event *event)
{
    gck_linked *on = event->on;
    int status;

    pthread_mutex_unlock(&store->lock);
    status = on->link->finish(on->index, event->handle);
    pthread_mutex_lock(&store->lock);
    if (gck_linked_said(on, status) != GCK_OK) {
        gck_event_lose(event);                   /* else the caller would wait again and again */
    }
}

void gck_store_await(gck_byte_store *store)
{
    gck_range_given given = gck_ranges_oldest(&store->ranges);

    if (given.offset >= 0) {
        finish_without_lock(store, given.last);
        gck_ranges_give(&store->ranges, given.offset, given.nbytes, given.last);
    } else if (store->flights != NULL) {
        gck_byte_store_item *item = store->flights;
        item->holds++;                           /* it may land, and be dropped, meanwhile */
        finish_without_lock(store, item->last);
        gck_store_poll(store);
        gck_store_release(item);
    } else {
        pthread_cond_wait(&store->done, &store->lock);
    }
}

void gck_store_settle(gck_byte_store *store, const gck_linked *on)
{
    gck_byte_store_item *item = store->oldest;

    while (item != NULL) {
        if (item->last != NULL && item->last->on == on) {      /* it flies, or a thread writes or reads it */
            gck_store_await(store);
            item = store->oldest;
        } else {
            item = item->newer;
        }
    }
    gck_ranges_finish(&store->ranges);
}
