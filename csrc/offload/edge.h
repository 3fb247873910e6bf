/* edge.h: the orders between accesses to the ring and to the store's memory.
 *
 * Each has a number; tests leave one out, and what then has no order is found. */
#ifndef GRADCKPT_EDGE_H
#define GRADCKPT_EDGE_H

enum {
    GCK_EDGE_COPY_OUT = 1,       /* a copy out, after its part of the ring was written                */
    GCK_EDGE_COPY_IN,            /* a copy in, after the copy out of the same bytes                   */
    GCK_EDGE_READ,               /* a read in the ring, after the copy in; or on another stream than the write */
    GCK_EDGE_READ_PAST,          /* a copy in past the ring, after the copy out                       */
    GCK_EDGE_READS,              /* what comes after two reads at once, after both                    */
    GCK_EDGE_RING,               /* another use of a part of the ring, after the last one             */
    GCK_EDGE_MEMORY,             /* another use of a part of the store's memory, after the last one   */
    GCK_EDGE_LANDED,             /* a write to the file, or an eviction, after the device's copy      */
    GCK_EDGES,
};

#ifdef GCK_LEAVE_OUT_EDGES
extern int gck_edge_left_out;
#define GCK_EDGE(number, order, without) (gck_edge_left_out == (number) ? (without) : (order))
#else
#define GCK_EDGE(number, order, without) (order)
#endif

#endif
