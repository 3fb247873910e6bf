/* store.c: the states of stored bytes, and the threads that move them.
 *
 * Each is at one of these places, under the store's lock:
 *
 *     FILLING   memory, which a put copies to          -> HERE
 *     HERE      memory                                 -> WRITING
 *     WRITING   memory; room in the file is taken      -> COPIED; HERE: the write failed
 *     COPIED    memory and file                        -> AWAY
 *     AWAY      file                                   -> READING
 *     READING   file; memory is taken                  -> COPIED; AWAY: the read failed
 *
 * Its memory goes from COPIED to AWAY only while no copy reads it (`uses`).  What is dropped while a thread has it is
 * freed by that thread, or by the last copy. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "offload/store.h"

#include "offload/space.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_THREADS = 8, GROW = 64 << 20 };

typedef enum { FILLING, HERE, WRITING, COPIED, AWAY, READING } place;

struct gck_byte_store_item {
    gck_byte_store  *store;
    gck_byte_store_item *older, *newer;   /* in the order in which they were put */
    gck_byte_store_item *next_job;
    int64_t     nbytes, padded;
    int64_t     memory, file;    /* offsets; -1: none */
    uint64_t    digest;
    place       at;
    int         uses;            /* copies that read its memory    */
    int         error;           /* of its last read               */
    int         dropped;
};

typedef struct {
    gck_byte_store_item *first, *last;
} queue;

struct gck_byte_store {
    pthread_mutex_t lock;
    pthread_cond_t  work, done;  /* for the threads; for the callers */
    pthread_t       threads[MOST_THREADS];
    int             n, ending;
    pid_t           process;
    int             prefetch;
    char           *memory;
    gck_space       memory_space, file_space;
    gck_file        file;
    gck_byte_store_item     *oldest, *newest;
    queue           reads, writes;
    int64_t         dirty;       /* bytes at HERE */
    gck_byte_store_figures figures;
};

/* To what the file moves at once. */
static int64_t padded(int64_t nbytes)
{
    return (nbytes + GCK_FILE_ALIGNMENT - 1) / GCK_FILE_ALIGNMENT * GCK_FILE_ALIGNMENT;
}

static void push(queue *q, gck_byte_store_item *s)
{
    s->next_job = NULL;
    if (q->last != NULL) {
        q->last->next_job = s;
    } else {
        q->first = s;
    }
    q->last = s;
}

static gck_byte_store_item *pop(queue *q)
{
    gck_byte_store_item *s = q->first;

    if (s != NULL && (q->first = s->next_job) == NULL) {
        q->last = NULL;
    }
    return s;
}

/* ---- places, under the lock ---- */

static void give_memory(gck_byte_store *store, gck_byte_store_item *s)
{
    if (s->memory >= 0) {
        gck_space_give(&store->memory_space, s->memory, s->padded);
    }
    s->memory = -1;
}

static void free_stored(gck_byte_store *store, gck_byte_store_item *s)
{
    if (s->older != NULL) {
        s->older->newer = s->newer;
    } else {
        store->oldest = s->newer;
    }
    if (s->newer != NULL) {
        s->newer->older = s->older;
    } else {
        store->newest = s->older;
    }
    store->dirty -= s->at == HERE ? s->padded : 0;
    give_memory(store, s);
    if (s->file >= 0) {
        gck_space_give(&store->file_space, s->file, s->padded);
    }
    free(s);
    pthread_cond_broadcast(&store->done);
}

/* Does a thread or a copy have it? */
static int is_busy(const gck_byte_store_item *s)
{
    return s->uses > 0 || s->at == FILLING || s->at == WRITING || s->at == READING;
}

static void free_if_dropped(gck_byte_store *store, gck_byte_store_item *s)
{
    if (s->dropped && !is_busy(s)) {
        free_stored(store, s);
    }
}

/* Take room in the file for it, which grows.  0 or -1. */
static int take_file(gck_byte_store *store, gck_byte_store_item *s)
{
    s->file = s->file < 0 ? gck_space_take_more(&store->file_space, s->padded, GROW) : s->file;
    if (store->file_space.used > store->figures.file_peak) {
        store->figures.file_peak = store->file_space.used;
    }
    return s->file < 0 ? -1 : 0;
}

/* Have the oldest written that are in memory alone, until so many bytes may stay so. */
static void write_down_to(gck_byte_store *store, int64_t most)
{
    for (gck_byte_store_item *s = store->oldest; s != NULL && store->dirty > most; s = s->newer) {
        if (s->at == HERE && !s->dropped && store->figures.write_error == 0) {
            if (take_file(store, s) < 0) {
                store->figures.write_error = GCK_STORE_NO_MEMORY;
                return;
            }
            s->at = WRITING;
            store->dirty -= s->padded;
            push(&store->writes, s);
            pthread_cond_signal(&store->work);
        }
    }
}

/* Free the memory of the oldest of which the file has a copy, but of none from `end` on (NULL: of any).  1, or 0: there
 * is none. */
static int evict(gck_byte_store *store, const gck_byte_store_item *end)
{
    for (gck_byte_store_item *s = store->oldest; s != NULL && s != end; s = s->newer) {
        if (s->at == COPIED && s->uses == 0) {
            give_memory(store, s);
            s->at = AWAY;
            return 1;
        }
    }
    return 0;
}

/* Take memory for it.  0; -1: only what is being moved could give some; -2: nothing could. */
static int take_memory(gck_byte_store *store, gck_byte_store_item *s, const gck_byte_store_item *end)
{
    while ((s->memory = gck_space_take(&store->memory_space, s->padded)) < 0) {
        if (!evict(store, end)) {
            int moving = 0;
            for (const gck_byte_store_item *other = store->oldest; other != NULL && !moving; other = other->newer) {
                moving = other->memory >= 0 && is_busy(other);
            }
            return moving ? -1 : -2;
        }
    }
    if (store->memory_space.used > store->figures.memory_peak) {
        store->figures.memory_peak = store->memory_space.used;
    }
    return 0;
}

/* ---- threads ---- */

static void move(gck_byte_store *store, gck_byte_store_item *s)
{
    const int writes = s->at == WRITING;
    char *bytes = store->memory + s->memory;
    int status;

    pthread_mutex_unlock(&store->lock);
    if (writes) {
        s->digest = gck_file_digest(bytes, s->padded);
        status = gck_file_write(&store->file, bytes, s->padded, s->file);
    } else {
        status = gck_file_read_checked(&store->file, bytes, s->padded, s->file, s->digest);
    }
    pthread_mutex_lock(&store->lock);
    if (writes && status != 0) {
        store->figures.write_error = status;
        gck_space_give(&store->file_space, s->file, s->padded);
        s->file = -1;
        s->at = HERE;
        store->dirty += s->padded;
    } else if (writes) {
        s->at = COPIED;
        store->figures.written += s->padded;
    } else {
        s->error = status;
        s->at = status == 0 ? COPIED : AWAY;
        store->figures.read += status == 0 ? s->padded : 0;
        if (status != 0) {
            give_memory(store, s);
        }
    }
    pthread_cond_broadcast(&store->done);
    free_if_dropped(store, s);
}

static void *run(void *argument)
{
    gck_byte_store *store = argument;

    pthread_mutex_lock(&store->lock);
    for (;;) {
        gck_byte_store_item *s = pop(&store->reads);      /* someone may wait for it */
        s = s != NULL ? s : pop(&store->writes);
        if (s != NULL && s->dropped) {           /* its bytes are not wanted any more */
            s->at = s->at == WRITING ? COPIED : AWAY;
            free_if_dropped(store, s);
        } else if (s != NULL) {
            move(store, s);
        } else if (store->ending) {
            break;
        } else {
            pthread_cond_wait(&store->work, &store->lock);
        }
    }
    pthread_mutex_unlock(&store->lock);
    return NULL;
}

/* ---- the store ---- */

void gck_byte_store_free(gck_byte_store *store)
{
    if (store->process != getpid()) {            /* its lock may be held for ever */
        return;
    }
    pthread_mutex_lock(&store->lock);
    store->ending = 1;
    pthread_cond_broadcast(&store->work);
    pthread_mutex_unlock(&store->lock);
    for (int i = 0; i < store->n; i++) {
        pthread_join(store->threads[i], NULL);
    }
    pthread_cond_destroy(&store->work);
    pthread_cond_destroy(&store->done);
    pthread_mutex_destroy(&store->lock);
    gck_file_close(&store->file);
    gck_space_clear(&store->memory_space);
    gck_space_clear(&store->file_space);
    if (store->memory != NULL) {
        munmap(store->memory, (size_t)store->figures.memory);
    }
    free(store);
}

int gck_byte_store_new(const gck_byte_store_options *options, gck_byte_store **store)
{
    gck_byte_store *made = calloc(1, sizeof *made);
    int status;

    *store = NULL;
    if (made == NULL || options->memory > INT64_MAX / 2) {
        free(made);
        return GCK_STORE_NO_MEMORY;
    }
    made->file.fd = -1;
    made->process = getpid();
    made->prefetch = options->prefetch;
    made->figures.memory = padded(options->memory);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->work, NULL);
    pthread_cond_init(&made->done, NULL);
    status = gck_file_open(&made->file, options->calls != NULL ? options->calls : &gck_file_system_calls,
                           options->directory);
    if (status == 0) {
        void *memory = mmap(NULL, (size_t)made->figures.memory, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        made->memory = memory != MAP_FAILED ? memory : NULL;
#ifdef MADV_DONTFORK
        madvise(made->memory, made->memory != NULL ? (size_t)made->figures.memory : 0, MADV_DONTFORK);
#endif
        status = made->memory == NULL || gck_space_grow(&made->memory_space, made->figures.memory) < 0
               ? GCK_STORE_NO_MEMORY : 0;
    }
    for (int i = 0; status == 0 && i < options->threads && i < MOST_THREADS; i++) {
        status = pthread_create(&made->threads[i], NULL, run, made);
        made->n += status == 0;
    }
    if (status != 0) {
        gck_byte_store_free(made);
        return status;
    }
    *store = made;
    return 0;
}

int gck_byte_store_put(gck_byte_store *store, const void *bytes, int64_t nbytes, gck_byte_store_item **stored)
{
    gck_byte_store_item *s;
    int status = 0, got, waited = 0;

    *stored = NULL;
    if (store->process != getpid()) {
        return GCK_STORE_FORKED;
    }
    if (nbytes <= 0 || nbytes > store->figures.memory) {
        return GCK_STORE_LARGE;
    }
    if ((s = calloc(1, sizeof *s)) == NULL) {
        return GCK_STORE_NO_MEMORY;
    }
    *s = (gck_byte_store_item){.store = store, .nbytes = nbytes, .memory = -1, .file = -1, .at = FILLING};
    s->padded = padded(nbytes);
    pthread_mutex_lock(&store->lock);
    write_down_to(store, store->figures.memory / 2 - s->padded);
    while ((got = take_memory(store, s, NULL)) < 0 && status == 0) {
        write_down_to(store, 0);                 /* it has to be in pieces, or larger than half */
        if (got == -2 && store->writes.first == NULL) {
            status = store->figures.write_error != 0 ? store->figures.write_error : GCK_STORE_FULL;
        } else {
            waited = 1;
            pthread_cond_wait(&store->done, &store->lock);
        }
    }
    if (status != 0) {
        pthread_mutex_unlock(&store->lock);
        free(s);
        return status;
    }
    s->older = store->newest;
    *(store->newest != NULL ? &store->newest->newer : &store->oldest) = s;
    store->newest = s;
    store->figures.puts++;
    store->figures.waits_put += waited;
    pthread_mutex_unlock(&store->lock);
    memcpy(store->memory + s->memory, bytes, (size_t)nbytes);
    memset(store->memory + s->memory + nbytes, 0, (size_t)(s->padded - nbytes));
    pthread_mutex_lock(&store->lock);
    s->at = HERE;
    store->dirty += s->padded;
    pthread_cond_broadcast(&store->done);        /* who waits for memory may have it written */
    pthread_mutex_unlock(&store->lock);
    *stored = s;
    return 0;
}

/* Have it read.  0; -1: memory may come; -2: it will not. */
static int fetch(gck_byte_store *store, gck_byte_store_item *s, const gck_byte_store_item *end)
{
    const int got = take_memory(store, s, end);

    if (got == 0) {
        s->at = READING;
        push(&store->reads, s);
        pthread_cond_signal(&store->work);
    }
    return got;
}

/* Have those read that are asked for next, if memory can be had without taking that of ones asked for earlier. */
static void prefetch(gck_byte_store *store, const gck_byte_store_item *s)
{
    int n = 0;

    for (gck_byte_store_item *other = s->older; other != NULL && n < store->prefetch; other = other->older, n++) {
        if (other->at == AWAY && !other->dropped && fetch(store, other, other) < 0) {
            return;
        }
    }
}

/* Nothing gives memory, since nothing is written any more: read it past the store's.  With the lock. */
static int read_past(gck_byte_store *store, gck_byte_store_item *s, void *bytes)
{
    void *aligned = NULL;
    int status = GCK_STORE_NO_MEMORY;

    pthread_mutex_unlock(&store->lock);
    if (posix_memalign(&aligned, GCK_FILE_ALIGNMENT, (size_t)s->padded) == 0) {
        status = gck_file_read_checked(&store->file, aligned, s->padded, s->file, s->digest);
        if (status == 0) {
            memcpy(bytes, aligned, (size_t)s->nbytes);
        }
        free(aligned);
    }
    pthread_mutex_lock(&store->lock);
    store->figures.gets += status == 0;
    store->figures.read += status == 0 ? s->padded : 0;
    return status;
}

int gck_byte_store_get(gck_byte_store_item *s, void *bytes)
{
    gck_byte_store *store = s->store;
    int status = 0, waited = 0;

    if (store->process != getpid()) {
        return GCK_STORE_FORKED;
    }
    pthread_mutex_lock(&store->lock);
    s->uses++;                                   /* else another's read takes its memory before this one wakes */
    while (status == 0 && (s->at == AWAY || s->at == READING)) {
        if (s->at == AWAY) {
            const int got = fetch(store, s, NULL);
            write_down_to(store, got < 0 ? 0 : INT64_MAX);
            if (got == -2 && store->writes.first == NULL) {
                status = read_past(store, s, bytes);
                goto done;
            }
        }
        waited = 1;
        s->error = 0;
        pthread_cond_wait(&store->done, &store->lock);
        status = s->error;
    }
    if (status == 0) {
        store->figures.gets++;
        store->figures.waits_get += waited;
        store->figures.from_memory += !waited;
        prefetch(store, s);
        pthread_mutex_unlock(&store->lock);
        memcpy(bytes, store->memory + s->memory, (size_t)s->nbytes);
        pthread_mutex_lock(&store->lock);
    }
done:
    s->uses--;
    pthread_cond_broadcast(&store->done);
    free_if_dropped(store, s);
    pthread_mutex_unlock(&store->lock);
    return status;
}

void gck_byte_store_drop(gck_byte_store_item *s)
{
    gck_byte_store *store = s->store;

    if (store->process != getpid()) {
        return;
    }
    pthread_mutex_lock(&store->lock);
    s->dropped = 1;
    free_if_dropped(store, s);
    pthread_mutex_unlock(&store->lock);
}

int64_t gck_byte_store_item_nbytes(const gck_byte_store_item *stored) { return stored->nbytes; }

void gck_byte_store_read_figures(gck_byte_store *store, gck_byte_store_figures *figures)
{
    if (store->process != getpid()) {
        *figures = (gck_byte_store_figures){.memory = store->figures.memory};
        return;
    }
    pthread_mutex_lock(&store->lock);
    *figures = store->figures;
    figures->memory_used = store->memory_space.used;
    figures->file_used = store->file_space.used;
    pthread_mutex_unlock(&store->lock);
}
