/* store.c: what callers ask of a store. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "offload/store.h"

#include "offload/store_parts.h"
#include "offload/store_memory.h"
#include "offload/store_threads.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 2 << 20 };         /* bytes: a large one */

static int64_t multiple_of(int64_t nbytes, int64_t unit) { return (nbytes + unit - 1) / unit * unit; }

static int64_t mapped_size(const gck_byte_store *store) { return store->figures.memory + PAGE; }

static void unpin(gck_byte_store *store)
{
    for (int64_t at = 0; at < store->figures.pinned; at += GCK_STORE_CHUNK) {
        store->pins.link->unpin(store->pins.index, store->memory + at);
    }
}

void gck_byte_store_free(gck_byte_store *store)
{
    if (!gck_store_lock(store)) {
        return;
    }
    store->ending = 1;
    pthread_cond_broadcast(&store->work);
    pthread_mutex_unlock(&store->lock);
    for (int i = 0; i < store->n; i++) {
        pthread_join(store->threads[i], NULL);
    }
    pthread_cond_destroy(&store->work);
    pthread_cond_destroy(&store->done);
    pthread_mutex_destroy(&store->lock);
    if (gck_store_has_file(store)) {
        gck_file_close(&store->file);
    }
    gck_ranges_finish(&store->ranges);
    gck_ranges_clear(&store->ranges);
    gck_space_clear(&store->file_space);
    while (store->lost != NULL) {
        gck_byte_store_item *item = store->lost;
        store->lost = item->next_job;
        free(item->past);
        free(item);
    }
    if (store->memory != NULL) {
        unpin(store);
        munmap(store->mapped, (size_t)mapped_size(store));
    }
    free(store);
}

/* Addresses for its memory, which the system gives when they are written: in large pages, since a request to the disk
 * may have only so many.  0 or why not. */
static int reserve_memory(gck_byte_store *store)
{
    void *mapped = mmap(NULL, (size_t)mapped_size(store), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (mapped == MAP_FAILED) {
        return GCK_STORE_NO_MEMORY;
    }
    store->mapped = mapped;
    store->memory = (char *)(uintptr_t)multiple_of((int64_t)(uintptr_t)mapped, PAGE);
#ifdef MADV_HUGEPAGE
    madvise(mapped, (size_t)mapped_size(store), MADV_HUGEPAGE);
#endif
#ifdef MADV_DONTFORK
    madvise(mapped, (size_t)mapped_size(store), MADV_DONTFORK);
#endif
    return 0;
}

int gck_byte_store_new(const gck_byte_store_options *options, gck_byte_store **store)
{
    gck_byte_store *made = calloc(1, sizeof *made);
    int status = 0;

    *store = NULL;
    if (made == NULL || options->memory > INT64_MAX / 2) {
        free(made);
        return GCK_STORE_NO_MEMORY;
    }
    made->file.fd = -1;
    made->process = getpid();
    made->prefetch = options->prefetch;
    made->ranges.edge = GCK_EDGE_MEMORY;
    made->figures.memory = multiple_of(options->memory, GCK_FILE_ALIGNMENT);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->work, NULL);
    pthread_cond_init(&made->done, NULL);
    if (options->directory != NULL) {
        status = gck_file_open(&made->file, options->calls != NULL ? options->calls : &gck_file_system_calls,
                               options->directory);
    }
    status = status == 0 ? reserve_memory(made) : status;
    for (int i = 0; status == 0 && options->directory != NULL && i < options->threads && i < GCK_STORE_THREADS; i++) {
        status = pthread_create(&made->threads[i], NULL, gck_store_run, made) == 0 ? 0 : GCK_STORE_NO_MEMORY;
        made->n += status == 0;
    }
    if (status != 0) {
        gck_byte_store_free(made);
        return status;
    }
    *store = made;
    return 0;
}

/* ---- put ---- */

/* Take its memory, once others have let go of theirs.  0 or why not. */
static int wait_for_memory(gck_byte_store *store, gck_byte_store_item *item, void *const *stream, int *waited)
{
    int got;

    while ((got = gck_store_take(store, item, NULL, stream)) != 0) {
        if (got == GCK_STORE_DEVICE) {
            return got;
        }
        gck_store_write_down_to(store, 0);       /* it has to be in pieces, or larger than half */
        if (got == -2 && store->writes.first == NULL) {
            return store->figures.write_error != 0 ? store->figures.write_error : GCK_STORE_FULL;
        }
        *waited = 1;
        gck_store_await(store);
        gck_store_poll(store);
    }
    return 0;
}

int gck_store_reserve(gck_byte_store *store, int64_t nbytes, void *const *stream, int of_graph,
                      gck_byte_store_item **reserved)
{
    gck_byte_store_item *item;
    int status, waited = 0;

    *reserved = NULL;
    if (nbytes <= 0 || nbytes > store->figures.memory) {
        return GCK_STORE_LARGE;
    }
    if ((item = calloc(1, sizeof *item)) == NULL) {
        return GCK_STORE_NO_MEMORY;
    }
    *item = (gck_byte_store_item){.store = store, .nbytes = nbytes, .memory = -1, .file = -1, .at = GCK_FILLING,
                                  .of_device = stream != NULL, .of_graph = of_graph};
    item->padded = multiple_of(nbytes, GCK_FILE_ALIGNMENT);
    gck_store_poll(store);
    gck_store_write_down_to(store, store->figures.memory / 2 - item->padded);
    /* what others use now is nothing that a captured stream could wait for */
    status = wait_for_memory(store, item, of_graph ? NULL : stream, &waited);
    if (status != 0) {
        free(item);
        return status;
    }
    item->older = store->newest;
    *(store->newest != NULL ? &store->newest->newer : &store->oldest) = item;
    store->newest = item;
    store->figures.puts++;
    store->figures.waits_put += waited;
    *reserved = item;
    return 0;
}

int gck_byte_store_reserve(gck_byte_store *store, int64_t nbytes, gck_byte_store_item **item)
{
    GCK_LOCKED gck_byte_store *locked = gck_store_lock(store);

    *item = NULL;
    return locked != NULL ? gck_store_reserve(store, nbytes, NULL, 0, item) : GCK_STORE_FORKED;
}

void gck_byte_store_filled(gck_byte_store_item *item)
{
    gck_byte_store *store = item->store;

    pthread_mutex_lock(&store->lock);
    item->at = GCK_HERE;
    store->dirty += item->padded;
    pthread_cond_broadcast(&store->done);        /* who waits for memory may have it written */
    pthread_mutex_unlock(&store->lock);
}

/* ---- get ---- */

/* Have it read.  0; -1: memory may come; -2: it will not; GCK_STORE_DEVICE. */
static int fetch(gck_byte_store *store, gck_byte_store_item *item, const gck_byte_store_item *end)
{
    const int got = gck_store_take(store, item, end, NULL);

    if (got == 0) {
        item->at = GCK_READING;
        gck_store_push(&store->reads, item);
        pthread_cond_signal(&store->work);
    }
    return got;
}

/* Have those read that are asked for next, if memory can be had without taking that of ones asked for earlier. */
static void prefetch(gck_byte_store *store, const gck_byte_store_item *item)
{
    int n = 0;

    for (gck_byte_store_item *other = item->older; other != NULL && n < store->prefetch; other = other->older, n++) {
        if (other->at == GCK_AWAY && !other->dropped && fetch(store, other, other) != 0) {
            return;
        }
    }
}

/* Nothing gives memory: read it past the store's. */
static int read_past(gck_byte_store_item *item)
{
    gck_byte_store *store = item->store;
    void *past = NULL;
    int status = GCK_STORE_NO_MEMORY;

    pthread_mutex_unlock(&store->lock);
    if (posix_memalign(&past, GCK_FILE_ALIGNMENT, (size_t)item->padded) == 0) {
        status = gck_file_read_checked(&store->file, past, item->padded, item->file, item->digest);
    }
    pthread_mutex_lock(&store->lock);
    if (status == 0 && item->past == NULL) {     /* else another thread was faster */
        item->past = past;
        past = NULL;
    }
    store->figures.read += status == 0 ? item->padded : 0;
    free(past);
    return status;
}

int gck_store_hold(gck_byte_store_item *item, int wait)
{
    gck_byte_store *store = item->store;
    int status = 0, waited = 0;

    gck_store_poll(store);
    if (item->at == GCK_FILLING && item->last != NULL && item->last->lost) {
        return GCK_STORE_DEVICE;                 /* its bytes may have come, or not */
    }
    item->holds++;                               /* else another's read takes its memory before this one wakes */
    while (status == 0 && item->past == NULL && (item->at == GCK_AWAY || item->at == GCK_READING)) {
        const int got = item->at == GCK_AWAY ? fetch(store, item, NULL) : 0;
        gck_store_write_down_to(store, got < 0 ? 0 : INT64_MAX);
        if (!wait) {
            status = GCK_STORE_BUSY;
        } else if (got == GCK_STORE_DEVICE || (got == -2 && store->writes.first == NULL)) {
            status = read_past(item);
        } else {
            waited = 1;
            item->error = 0;
            gck_store_await(store);
            gck_store_poll(store);
            status = item->error;
        }
    }
    if (status != 0) {
        gck_store_release(item);
        return status;
    }
    store->figures.gets++;
    store->figures.waits_get += waited;
    store->figures.from_memory += !waited && item->past == NULL;
    prefetch(store, item);
    return 0;
}

int gck_byte_store_hold(gck_byte_store_item *item)
{
    GCK_LOCKED gck_byte_store *locked = gck_store_lock(item->store);

    return locked != NULL ? gck_store_hold(item, 1) : GCK_STORE_FORKED;
}

void gck_byte_store_release(gck_byte_store_item *item)
{
    gck_byte_store *store = item->store;

    pthread_mutex_lock(&store->lock);
    gck_store_release(item);
    pthread_mutex_unlock(&store->lock);
}

int gck_byte_store_is_near(const gck_byte_store_item *item)
{
    GCK_LOCKED gck_byte_store *locked = gck_store_lock(item->store);

    return locked != NULL && (item->at == GCK_HERE || item->at == GCK_WRITING || item->at == GCK_COPIED);
}

void *gck_byte_store_memory(const gck_byte_store_item *item)
{
    return item->past != NULL ? item->past : item->store->memory + item->memory;
}

/* ---- the end of an item ---- */

void gck_store_drop(gck_byte_store_item *item)
{
    item->dropped = 1;
    gck_store_free_if_dropped(item);
}

void gck_byte_store_drop(gck_byte_store_item *item)
{
    GCK_LOCKED gck_byte_store *locked = gck_store_lock(item->store);

    if (locked != NULL) {
        gck_store_drop(item);
    }
}

int64_t gck_byte_store_nbytes(const gck_byte_store_item *item) { return item->nbytes; }

int gck_byte_store_was_refused_pins(gck_byte_store *store)
{
    pthread_mutex_lock(&store->lock);
    const int refused = store->pins_refused;
    store->pins_refused = 0;
    pthread_mutex_unlock(&store->lock);
    return refused;
}

void gck_byte_store_read_figures(gck_byte_store *store, int restart, gck_byte_store_figures *figures)
{
    GCK_LOCKED gck_byte_store *locked = gck_store_lock(store);

    if (locked == NULL) {
        *figures = (gck_byte_store_figures){.memory = store->figures.memory};
        return;
    }
    gck_store_poll(store);
    gck_ranges_poll(&store->ranges);
    *figures = store->figures;
    figures->memory_used = store->ranges.space.used;
    figures->file_used = store->file_space.used;
    if (restart) {
        store->figures = (gck_byte_store_figures){
            .memory = figures->memory, .memory_taken = figures->memory_taken, .pinned = figures->pinned,
            .memory_peak = figures->memory_used, .file_peak = figures->file_used,
            .write_error = figures->write_error,
        };
    }
}
