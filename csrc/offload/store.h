/* store.h: bytes that live in host memory, and in a file when there are more.
 *
 * What is put first is needed last, since a backward goes the other way; so the oldest goes to the file first, and the
 * newest is often still in memory when it is asked for.  That order is a guess which only costs time.
 *
 * Functions may wait for the file's threads or a device: callers hold no lock that those could want.  Any thread may
 * call. */
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
    const char *directory;       /* NULL: there is no file                                       */
    const gck_file_calls *calls; /* NULL: the system's                                           */
} gck_byte_store_options;

typedef struct {
    int64_t memory, memory_used, memory_peak;     /* bytes                                       */
    int64_t memory_taken, pinned, pin_calls;      /* from the system; of it; by so many calls    */
    int64_t file_used, file_peak;
    int64_t written, read;
    int64_t write_ns, read_ns;                    /* in which some thread wrote; read            */
    int64_t puts, gets, from_memory;              /* calls; of the gets                          */
    int64_t waits_put, waits_get;                 /* calls that waited                           */
    int     write_error;                          /* why nothing is written any more; 0: it is   */
} gck_byte_store_figures;

/* 0 and *store; else why not. */
int gck_byte_store_new(const gck_byte_store_options *options, gck_byte_store **store);

/* End its threads and its file; all that it held was dropped. */
void gck_byte_store_free(gck_byte_store *store);

/* Memory for so many bytes, which the caller writes; meanwhile it reserves and holds nothing.  0 and *item; else why
 * not. */
int gck_byte_store_reserve(gck_byte_store *store, int64_t nbytes, gck_byte_store_item **item);

/* They are written. */
void gck_byte_store_filled(gck_byte_store_item *item);

/* Have its bytes in memory until gck_byte_store_release(), as often as wanted.  0 or why not. */
int  gck_byte_store_hold(gck_byte_store_item *item);
void gck_byte_store_release(gck_byte_store_item *item);

/* Where its bytes are, reserved or held. */
void *gck_byte_store_memory(const gck_byte_store_item *item);

/* 1 when its bytes are in memory. */
int gck_byte_store_is_near(const gck_byte_store_item *item);

/* They are not needed any more, but by who holds them. */
void gck_byte_store_drop(gck_byte_store_item *item);

int64_t gck_byte_store_nbytes(const gck_byte_store_item *item);

void gck_byte_store_read_figures(gck_byte_store *store, gck_byte_store_figures *figures);

#endif
