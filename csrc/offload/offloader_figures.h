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

#endif
