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
#include "offload/store_figures.h"

typedef struct {
    int64_t memory;              /* bytes, of which the store writes nothing until half are used */
    int     prefetch;            /* so many before the one that was asked for are read, too      */
    int     threads;
    const char *directory;       /* NULL: there is no file                                       */
    const gck_file_calls *calls; /* NULL: the system's                                           */
} gck_byte_store_options;

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

/* 1, once: since the last call a device has refused to pin some of its memory. */
int gck_byte_store_was_refused_pins(gck_byte_store *store);

/* restart: count from here, and the peaks are what is in use. */
void gck_byte_store_read_figures(gck_byte_store *store, int restart, gck_byte_store_figures *figures);

/* ---- for this package, with the lock (store_parts.h) ---- */

/* As gck_byte_store_reserve(), for work on *stream of a device.  of_graph: which is captured, so that its memory is
 * used by nothing else before the item is dropped. */
int gck_store_reserve(gck_byte_store *store, int64_t nbytes, void *const *stream, int of_graph,
                      gck_byte_store_item **item);

/* As gck_byte_store_hold(); wait 0: GCK_STORE_BUSY when its bytes have to be read, which begins. */
int  gck_store_hold(gck_byte_store_item *item, int wait);
void gck_store_drop(gck_byte_store_item *item);

#endif
