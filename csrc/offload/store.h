/* store.h: bytes that live in host memory, and in a file when there are more.
 *
 * What is put first is needed last, since a backward goes the other way; so the oldest goes to the file first, and the
 * newest is often still in memory when it is asked for.  That order is a guess which only costs time.
 *
 * A put or get waits for the file's threads: callers hold no lock that those could want.  Any thread may call. */
#ifndef GRADCKPT_STORE_H
#define GRADCKPT_STORE_H

#include "offload/file.h"
#include "offload/store_status.h"

typedef struct gck_byte_store gck_byte_store;
typedef struct gck_byte_store_item gck_byte_store_item;

typedef struct {
    int64_t memory;              /* bytes, of which the store writes nothing until half are used */
    int     prefetch;            /* so many before the one that was asked for are read, too      */
    int     threads;
    const char *directory;
    const gck_file_calls *calls; /* NULL: the system's                                           */
} gck_byte_store_options;

typedef struct {
    int64_t memory, memory_used, memory_peak;     /* bytes                                       */
    int64_t file_used, file_peak;
    int64_t written, read;
    int64_t puts, gets, from_memory;              /* calls; of the gets                          */
    int64_t waits_put, waits_get;                 /* calls that waited                           */
    int     write_error;                          /* why nothing is written any more; 0: it is   */
} gck_byte_store_figures;

/* 0 and *store; else why not. */
int gck_byte_store_new(const gck_byte_store_options *options, gck_byte_store **store);

/* End its threads and its file; all that it held was dropped. */
void gck_byte_store_free(gck_byte_store *store);

/* Copy these bytes into it.  0 and *stored; else why not, and the caller keeps them. */
int gck_byte_store_put(gck_byte_store *store, const void *bytes, int64_t nbytes, gck_byte_store_item **stored);

/* Copy them out, as often as wanted.  0 or why not. */
int gck_byte_store_get(gck_byte_store_item *stored, void *bytes);

/* They are not needed any more. */
void gck_byte_store_drop(gck_byte_store_item *stored);

int64_t gck_byte_store_item_nbytes(const gck_byte_store_item *stored);

void gck_byte_store_read_figures(gck_byte_store *store, gck_byte_store_figures *figures);

#endif
