/* store_figures.h: a store and its items, what it counts, and what it answers beside 0. */
#ifndef GRADCKPT_STORE_FIGURES_H
#define GRADCKPT_STORE_FIGURES_H

#include <stdint.h>

typedef struct gck_byte_store gck_byte_store;
typedef struct gck_byte_store_item gck_byte_store_item;

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

/* Results below 0, beside those of file.h; above, a result is the errno of a call. */
enum {
    GCK_STORE_LARGE = -11,       /* larger than the memory of the store */
    GCK_STORE_FULL = -12,        /* the file takes nothing any more, and the memory is full                         */
    GCK_STORE_NO_MEMORY = -13,
    GCK_STORE_BUSY = -14,        /* its bytes are not in memory yet     */
    GCK_STORE_FORKED = -15,      /* a child of the process that made it: its threads are not here                   */
    GCK_STORE_DEVICE = -16,      /* gck_offloader_status() says         */
    GCK_STORE_RING = -17,        /* the ring has no room                */
    GCK_STORE_PAGEABLE = -18,    /* a graph needs memory that is pinned */
};

/* A sentence's part on what went wrong. */
const char *gck_byte_store_text(int status);

#endif
