/* offloader_graph.c: the streams and the memory of an offloader in a captured graph. */
#include "offload/offloader_graph.h"

#include "offload/offloader_parts.h"
#include "offload/store.h"
#include "offload/store_parts.h"

#include <stdlib.h>

/* ---- life ---- */

static void graph_ended(void *data)
{
    gck_offloader *o = data;
    void (*const ended)(void) = o->options.ended;

    o->alive--;                                  /* from now on it may be freed */
    ended();
}

int gck_graph_use(gck_offloader *o, uint64_t graph, void *stream)
{
    gck_linked *on = &o->on;
    gck_graph_user *user = o->users;

    while (user != NULL && user->graph != graph) {
        user = user->next;
    }
    if (user != NULL) {
        return 0;
    }
    if ((user = malloc(sizeof *user)) == NULL) {
        return GCK_STORE_NO_MEMORY;
    }
    o->alive++;
    if (gck_linked_said(on, on->link->at_end_of_graph(on->index, stream, graph_ended, o)) != GCK_OK) {
        o->alive--;
        free(user);
        return GCK_STORE_DEVICE;
    }
    *user = (gck_graph_user){graph, o->users};
    o->users = user;
    return 0;
}

/* ---- streams ---- */

/* What is captured on its streams from now on comes after what it waits for alone.  GCK_OK or a status. */
static int unjoin(gck_offloader *o)
{
    gck_linked *on = &o->on;
    int status = GCK_OK;

    for (int i = 0; i < o->joined && status == GCK_OK && o->now != 0; i++) {
        status = gck_linked_said(on, on->link->unjoin(on->index, i == 0 ? o->out : o->in));
    }
    return status;
}

int gck_graph_enter(gck_offloader *o, void *stream)
{
    gck_linked *on = &o->on;
    gck_event *here;
    int status;

    if (on->graph == 0) {
        return 0;
    }
    o->joined = 0;
    if (gck_linked_graph_of(on, stream, &o->now) != GCK_OK) {
        return GCK_STORE_DEVICE;
    }
    o->outside |= o->now == 0;
    if (o->now != 0 && (status = gck_graph_use(o, o->now, stream)) != 0) {
        return status;
    }
    if ((here = gck_event_take(on)) == NULL) {
        return GCK_STORE_DEVICE;
    }
    status = gck_event_record(here, stream);
    for (int i = 0; i < 2 && status == GCK_OK; i++) {
        status = gck_linked_said(on, on->link->wait(on->index, i == 0 ? o->out : o->in, here->handle));
        o->joined += status == GCK_OK;
    }
    gck_event_give(here);
    return status == GCK_OK && unjoin(o) == GCK_OK ? 0 : GCK_STORE_DEVICE;
}

int gck_graph_leave(gck_offloader *o)
{
    return o->on.graph == 0 || unjoin(o) == GCK_OK ? 0 : GCK_STORE_DEVICE;
}

int gck_graph_is_stale(const gck_offloaded *b)
{
    const gck_offloader *o = b->offloader;

    return o->on.graph != 0 && b->ring >= 0 && b->copied && b->readers == 0 && (o->now == 0 || b->graph != o->now);
}

/* ---- memory ---- */

/* Taken out of those that are kept: the smallest that holds so many bytes; NULL: none does. */
static gck_byte_store_item *smallest(gck_offloader *o, int64_t nbytes)
{
    gck_byte_store_item **best = NULL, *found;

    for (gck_byte_store_item **at = &o->kept; *at != NULL; at = &(*at)->next_job) {
        if ((*at)->padded >= nbytes && (best == NULL || (*at)->padded < (*best)->padded)) {
            best = at;
        }
    }
    if (best == NULL) {
        return NULL;
    }
    found = *best;
    *best = found->next_job;
    found->nbytes = nbytes;
    return found;
}

int gck_graph_reserve(gck_offloaded *b)
{
    gck_offloader *o = b->offloader;
    int status = 0;

    if ((b->item = smallest(o, b->nbytes)) == NULL) {
        status = gck_store_reserve(o->store, b->nbytes, &o->out, 1, &b->item);
    }
    if (status == 0 && b->item->memory + b->item->padded > o->store->figures.pinned) {
        status = GCK_STORE_PAGEABLE;
    }
    return status;
}

void gck_graph_keep(gck_offloader *o, gck_byte_store_item *item)
{
    item->next_job = o->kept;
    o->kept = item;
}

void gck_graph_fix(gck_offloaded *b)
{
    gck_offloader *o = b->offloader;

    b->newer = o->fixed;
    o->fixed = b;
}

/* What work outside of graphs has queued on the streams of copies.  It ends, or the device fails. */
static void finish_streams(gck_offloader *o)
{
    for (int i = 0; i < 2; i++) {
        gck_event *end = gck_event_take(&o->on);
        if (end != NULL && gck_event_record(end, i == 0 ? o->out : o->in) == GCK_OK) {
            gck_event_finish(end);
        }
        gck_event_give(end);
    }
}

/* Whatever a graph does, and an event that was lost there, ends with it. */
void gck_graph_clear(gck_offloader *o)
{
    if (o->outside) {
        finish_streams(o);
    }
    while (o->fixed != NULL) {
        gck_offloaded *b = o->fixed;
        o->fixed = b->newer;
        gck_offloaded_leave_ring(b);
        free(b);
    }
    while (o->users != NULL) {
        gck_graph_user *user = o->users;
        o->users = user->next;
        free(user);
    }
    while (o->kept != NULL) {
        gck_byte_store_item *item = o->kept;
        o->kept = item->next_job;
        if (item->last != NULL
            && (!o->outside || (!item->last->lost && gck_event_finish(item->last) == GCK_OK))) {
            gck_event_give(item->last);
            item->last = NULL;
        }
        gck_store_drop(item);
    }
}
