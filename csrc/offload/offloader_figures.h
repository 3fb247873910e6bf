/* offloader_figures.h: an offloader and its bytes, what it is told and what it counts. */
#ifndef GRADCKPT_OFFLOADER_FIGURES_H
#define GRADCKPT_OFFLOADER_FIGURES_H

#include <stdint.h>

typedef struct gck_offloader gck_offloader;
typedef struct gck_offloaded gck_offloaded;

typedef struct {
    int64_t held;                /* newest bytes that are not copied out; -1: a third of the ring  */
    int     prefetch;            /* so many before the one that is read are copied in, too         */
    uint64_t graph;              /* whose work it is for (gck_link.graph_of); 0: of no graph       */
    void    *stream;             /* that is captured into it                                       */
    void   (*ended)(void);       /* it is gone; called as gck_link says                            */
} gck_offloader_options;

typedef struct {
    int64_t ring, ring_used, ring_peak;       /* bytes of the device                              */
    int64_t ring_lost;                        /* of it: never used again, since the device failed */
    int64_t bytes_out, bytes_in;              /* copied                                           */
    int64_t copies_out, copies_in;
    int64_t read_in_ring;                     /* reads of what never left                         */
    int64_t prefetched;                       /* reads of what was copied in ahead                */
    int64_t misses_out, misses_in;            /* the ring had no room for a write; for a read     */
} gck_offloader_figures;

/* Add what was counted, not what is in use. */
static inline void gck_offloader_add_counts(gck_offloader_figures *to, const gck_offloader_figures *more)
{
    to->bytes_out += more->bytes_out;
    to->bytes_in += more->bytes_in;
    to->copies_out += more->copies_out;
    to->copies_in += more->copies_in;
    to->read_in_ring += more->read_in_ring;
    to->prefetched += more->prefetched;
    to->misses_out += more->misses_out;
    to->misses_in += more->misses_in;
}

#endif
