/* offloader.h: moves bytes between a device and a store.
 *
 * Bytes are written into the ring, a part of the device's memory of fixed size; copies on streams of their own take
 * them to the store, whose memory is pinned, and back into the ring before they are read.  The newest stay in the ring,
 * since a backward reads them first.  Nothing is waited for but the file's threads: streams wait for each other.
 *
 * Each access to a part of the ring or of the store's memory comes after the one before it, by an edge that has a
 * number (GCK_EDGE). */
#ifndef GRADCKPT_OFFLOADER_H
#define GRADCKPT_OFFLOADER_H

#include "offload/event.h"
#include "offload/offloader_figures.h"
#include "offload/store.h"

/* 0 and *made, or a status of store_figures.h.  link, store: borrowed, for as long as it lives. */
int gck_offloader_new(const gck_link *link, int index, gck_byte_store *store, const gck_offloader_options *options,
                      gck_offloader **made);

/* Wait for its copies; nothing of it is in use, and the graph that it may be for is gone. */
void gck_offloader_free(gck_offloader *offloader);

/* 1 when it was for a graph that is gone, as are those that have read its bytes, and has no bytes. */
int gck_offloader_is_over(gck_offloader *offloader);

/* The graph that it is for; 0: none. */
uint64_t gck_offloader_graph(const gck_offloader *offloader);

/* Make the ring larger by this memory of the device, which lives as long, and which work on this stream may still use.
 * 0 or a status. */
int gck_offloader_add(gck_offloader *offloader, void *memory, int64_t nbytes, void *stream);

/* How much larger the ring should be for payloads of so many bytes, if it is to hold so many of them. */
int64_t gck_offloader_wants(gck_offloader *offloader, int64_t nbytes, int payloads);

/* A part of the ring that work on this stream writes.  0; GCK_STORE_RING: it has no room; or why the store has
 * none. */
int gck_offloader_take(gck_offloader *offloader, int64_t nbytes, void *stream, gck_offloaded **bytes);

/* That work is queued.  0 or a status: its memory is not used again before the device is idle. */
int gck_offloaded_written(gck_offloaded *bytes, void *stream);

/* Have the bytes in the ring, for work on this stream, until gck_offloaded_let_go().  0; GCK_STORE_RING; or why they
 * cannot be had. */
int gck_offloaded_bring(gck_offloaded *bytes, void *stream);

/* The work that reads them is queued on this stream.  0 or a status. */
int gck_offloaded_let_go(gck_offloaded *bytes, void *stream);

/* Queue a copy of some of them to this memory of the device on this stream: for GCK_STORE_RING.  0 or why not. */
int gck_offloaded_copy(gck_offloaded *bytes, int64_t from, int64_t nbytes, void *to, void *stream);

/* 1 when they are in the ring and were never copied. */
int gck_offloaded_is_near(const gck_offloaded *bytes);

/* Where they are in the ring. */
void *gck_offloaded_memory(const gck_offloaded *bytes);

/* They are not needed any more, but by who has brought them. */
void gck_offloaded_drop(gck_offloaded *bytes);

gck_offloader *gck_offloaded_of(const gck_offloaded *bytes);
int64_t        gck_offloaded_nbytes(const gck_offloaded *bytes);

/* The last status > 0 of its device. */
int gck_offloader_status(const gck_offloader *offloader);

/* restart: count from here, and the peak is what is in use. */
void gck_offloader_read_figures(gck_offloader *offloader, int restart, gck_offloader_figures *figures);

#endif
