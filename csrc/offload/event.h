/* event.h: where the queued work on some bytes stands, and the orders between such accesses. */
#ifndef GRADCKPT_EVENT_H
#define GRADCKPT_EVENT_H

#include "gradckpt.h"

/* The orders between accesses to the ring and to the store's memory.  Each has a number; tests leave one out, and what
 * then has no order is found. */
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

/* A device, as offload/ knows it, and its events that are not in use. */
typedef struct gck_linked {
    const gck_link *link;
    int             index;
    _Atomic int     status;        /* its last that was not GCK_OK, or GCK_E_MEMORY; read without a lock */
    uint64_t        graph;         /* the one that its work is captured into; 0: none                    */
    struct gck_event *unused;
} gck_linked;

/* The last work that was queued on some bytes, by whatever stream. */
typedef struct gck_event {
    gck_linked       *on;
    void             *handle;
    int               open;        /* it was recorded, and is not known to be done */
    int               lost;        /* it could not be recorded: what it stands for may run for ever */
    uint64_t          graph;       /* where it was recorded; see gck_linked_graph_of()              */
    struct gck_event *next;
} gck_event;

/* Record what the device answered: it. */
int gck_linked_said(gck_linked *on, int status);

/* *graph: where work on this stream goes, the graph that it is captured into; 0: none, and of a device whose work is
 * not captured.  GCK_OK or a status.
 *
 * Graphs are launched one after the other, so an event orders only work of the graph in which it was recorded:
 * elsewhere it is no event of the device, and is not waited for. */
int gck_linked_graph_of(gck_linked *on, void *stream, uint64_t *graph);

/* NULL: there is no memory, or the device makes none; its status says which. */
gck_event *gck_event_take(gck_linked *on);
void       gck_event_give(gck_event *event);

/* Everything that is queued on this stream now comes before it.  0 or a status: it is lost. */
int gck_event_record(gck_event *event, void *stream);

/* What is queued on this stream from now on comes after it.  0 or a status. */
int gck_event_wait(const gck_event *event, void *stream);

/* The device refuses what would tell when that work is done.  Then it is never done, and waiting for it fails. */
void gck_event_lose(gck_event *event);

/* 1: it is done; 0; the device's error counts as not done. */
int gck_event_is_done(gck_event *event);

/* Wait for it.  0 or a status. */
int gck_event_finish(gck_event *event);

/* Free what is not in use. */
void gck_linked_clear(gck_linked *on);

#endif
