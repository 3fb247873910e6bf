/* offloader_graph.h: offloading in a captured graph, whose copies run again whenever it is launched.
 *
 * Such an offloader has its ring and memory of the store for itself until the graph is gone, since a launch writes
 * into them again.  Its copies lie in the graph beside the other work and are joined only by what waits for them.
 * Another graph, or work outside of any, may read its bytes: it finds what the last launch has left, and changes
 * nothing that the next one needs.  All with the store's lock. */
#ifndef GRADCKPT_OFFLOADER_GRAPH_H
#define GRADCKPT_OFFLOADER_GRAPH_H

#include "offload/offloader_parts.h"

/* Have it live as long as the graph that this stream is captured into.  0 or a status. */
int gck_graph_use(gck_offloader *offloader, uint64_t graph, void *stream);

/* Its streams follow this one, into a graph or out of it, until gck_graph_leave().  0 or a status. */
int gck_graph_enter(gck_offloader *offloader, void *stream);
int gck_graph_leave(gck_offloader *offloader);

/* Only its own graph moves what is in the ring alone: a launch writes it there again. */
static inline int gck_graph_is_foreign(const gck_offloader *offloader)
{
    return offloader->now != offloader->on.graph;
}

/* They were copied into the ring where launches come between: what is there now may be others'. */
int gck_graph_is_stale(const gck_offloaded *bytes);

/* They were dropped, and keep their part of the ring: another graph reads it there, whatever runs between launches. */
void gck_graph_fix(gck_offloaded *bytes);

/* Memory of the store for them; its item's last event, if it has one, comes before the copy out.  0 or a status. */
int gck_graph_reserve(gck_offloaded *bytes);

/* It is not needed any more: later ones may have its memory. */
void gck_graph_keep(gck_offloader *offloader, gck_byte_store_item *item);

/* The graphs are gone, and so are the bytes. */
void gck_graph_clear(gck_offloader *offloader);

#endif
