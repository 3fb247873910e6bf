/* store_parts.h: what a store is made of, for the files of this package.
 *
 * Each item is at one of these places, under the store's lock:
 *
 *     FILLING   memory, which the caller or a device writes  -> HERE
 *     HERE      memory                                       -> WRITING
 *     WRITING   memory; room in the file is taken            -> COPIED; HERE: the write failed
 *     COPIED    memory and file                              -> AWAY
 *     AWAY      file                                         -> READING
 *     READING   file; memory is taken                        -> COPIED; AWAY: the read failed
 *
 * Its memory goes from COPIED to AWAY only while nothing reads it (`holds`, `in_flight`).  What is dropped while a
 * thread or a device has it is freed after that. */
#ifndef GRADCKPT_STORE_PARTS_H
#define GRADCKPT_STORE_PARTS_H

#include "offload/file.h"
#include "offload/ranges.h"
#include "offload/store_figures.h"

#include <pthread.h>
#include <unistd.h>

enum {
    GCK_STORE_THREADS = 8,       /* at most                                          */
    GCK_STORE_CHUNK = 16 << 20,  /* bytes: memory grows and is pinned by so many     */
};

typedef enum {
    GCK_FILLING, GCK_HERE, GCK_WRITING, GCK_COPIED, GCK_AWAY, GCK_READING,
} gck_store_place;

struct gck_byte_store_item {
    gck_byte_store      *store;
    gck_byte_store_item *older, *newer;   /* in the order in which they were reserved             */
    gck_byte_store_item *next_job, *next_flight;
    int64_t              nbytes, padded;
    int64_t              memory, file;    /* offsets; -1: none                                    */
    void                *past;            /* owned: its bytes in memory that is not the store's   */
    uint64_t             digest;
    gck_store_place      at;
    int                  of_device;       /* that writes it, at some time                         */
    int                  of_graph;        /* again and again: it stays FILLING                    */
    int                  holds;           /* of callers                                           */
    int                  in_flight;       /* a device reads or writes its memory, until `last`; with a file only */
    gck_event           *last;            /* owned: the device's last use of it; NULL: none       */
    int                  error;           /* of its last read                                     */
    int                  dropped;
};

/* Items that wait for a thread of the store. */
typedef struct {
    gck_byte_store_item *first, *last;
} gck_store_queue;

/* Threads that do something now, and the ns when the first of them began. */
typedef struct {
    int     threads;
    int64_t since;
} gck_store_span;

struct gck_byte_store {
    pthread_mutex_t        lock;
    pthread_cond_t         work, done;    /* for the threads; for the callers                     */
    pthread_t              threads[GCK_STORE_THREADS];
    int                    n, ending;
    pid_t                  process;
    int                    prefetch;
    gck_linked             pins;          /* pins its memory; link NULL: none does                */
    int                    pins_refused;  /* which the caller is told once                         */
    char                  *memory;
    void                  *mapped;        /* its addresses, and some before: memory is aligned    */
    gck_ranges             ranges;        /* of it                                                */
    gck_space              file_space;
    gck_file               file;          /* fd -1: none                                          */
    gck_byte_store_item   *oldest, *newest;
    gck_store_queue        reads, writes;
    gck_byte_store_item   *flights, *last_flight;
    gck_byte_store_item   *lost;          /* dropped; freed at its end: a device may read their bytes */
    int64_t                dirty;         /* bytes at HERE                                        */
    gck_store_span         writing, reading;
    gck_byte_store_figures figures;
};

/* A local store, or NULL, whose lock is held until its block ends, by whatever way. */
#define GCK_LOCKED __attribute__((cleanup(gck_store_unlock)))

static inline void gck_store_unlock(gck_byte_store *const *locked)
{
    if (*locked != NULL) {
        pthread_mutex_unlock(&(*locked)->lock);
    }
}

/* The store, locked; NULL in a child of the process that made it, where the lock may be held for ever. */
static inline gck_byte_store *gck_store_lock(gck_byte_store *store)
{
    return store->process == getpid() && pthread_mutex_lock(&store->lock) == 0 ? store : NULL;
}

static inline int gck_store_has_file(const gck_byte_store *store) { return store->file.fd >= 0; }

static inline void gck_store_push(gck_store_queue *queue, gck_byte_store_item *item)
{
    item->next_job = NULL;
    *(queue->last != NULL ? &queue->last->next_job : &queue->first) = item;
    queue->last = item;
}

/* Borrowed: the first, taken out; NULL: none. */
static inline gck_byte_store_item *gck_store_pop(gck_store_queue *queue)
{
    gck_byte_store_item *item = queue->first;

    if (item != NULL && (queue->first = item->next_job) == NULL) {
        queue->last = NULL;
    }
    return item;
}

#endif
