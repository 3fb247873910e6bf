/* offloader_parts.h: what an offloader and its bytes are made of, and the parts of the ring that bytes have. */
#ifndef GRADCKPT_OFFLOADER_PARTS_H
#define GRADCKPT_OFFLOADER_PARTS_H

#include "offload/offloader_figures.h"
#include "offload/ring.h"
#include "offload/store_figures.h"

struct gck_offloaded {
    gck_offloader       *offloader;
    gck_offloaded       *older, *newer;          /* of all, in the order in which they were taken      */
    int64_t              number;                 /* in that order                                      */
    int64_t              nbytes, size;           /* size: in the ring                                  */
    int64_t              ring;                   /* its part of it; -1: none                           */
    gck_event           *last;                   /* owned: its last use of that; NULL: it has none     */
    gck_byte_store_item *item;                   /* owned: its memory in the store                     */
    int                  held;                   /* written, and its copy out is not queued            */
    int                  copied;                 /* that is queued                                     */
    int                  ahead;                  /* it was copied in before it was asked for           */
    uint64_t             graph;                  /* in which it was copied in; 0: in none              */
    int                  fixed;                  /* a graph reads it where its own one writes it       */
    int                  readers;                /* between bring and let go                           */
    int                  at_once;                /* there were several                                 */
    int                  written, dropped;
    void                *stream;                 /* until then: what may write it                      */
};

typedef struct gck_graph_user {
    uint64_t               graph;
    struct gck_graph_user *next;
} gck_graph_user;

struct gck_offloader {
    gck_linked            on;
    gck_byte_store       *store;
    gck_offloader_options options;
    void                 *out, *in;              /* streams                                            */
    gck_ring              ring;
    gck_offloaded        *oldest, *newest;
    gck_offloaded        *held;                  /* none before it is held; NULL: none is              */
    int64_t               taken;                 /* so far                                             */
    int64_t               bytes_held;
    gck_offloader_figures figures;
    /* Of one for a graph, see offloader_graph.h. */
    uint64_t              now;                   /* the graph that asks now; 0: none                   */
    gck_byte_store_item  *kept;                  /* owned: of bytes that were dropped                  */
    gck_offloaded        *fixed;                 /* owned: bytes that were dropped                     */
    gck_graph_user       *users;                 /* owned: it, and others that have read its bytes     */
    _Atomic int           alive;                 /* so many of those are not gone                      */
    int                   joined;                /* so many of its streams are in the graph `now`      */
    int                   outside;               /* work outside of graphs has read, too               */
};

/* ---- with the store's lock ---- */

/* Give them a part for work on this stream.  0; GCK_STORE_RING; GCK_STORE_DEVICE. */
int gck_offloaded_take_ring(gck_offloaded *bytes, void *stream);

/* Everything on this stream up to now may use it.  0 or a status. */
int gck_offloaded_used_by(gck_offloaded *bytes, void *stream);

/* Give it back, after that. */
void gck_offloaded_leave_ring(gck_offloaded *bytes);

/* Free the part of some that the store has, too: the oldest, which are read last.  ahead: copied in, and not read
 * yet; else read, and perhaps read once more.  1, or 0: there are none. */
int gck_offloader_evict(gck_offloader *offloader, int ahead);

#endif
