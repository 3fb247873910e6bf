/* store_figures.h: a store and its items, and what it counts. */
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

#endif
