/* event.c: events, which are used again. */
#include "offload/event.h"

#include <stdlib.h>

int gck_linked_said(gck_linked *on, int status)
{
    if (status != GCK_OK) {
        on->status = status;
    }
    return status;
}

int gck_linked_graph_of(gck_linked *on, void *stream, uint64_t *graph)
{
    *graph = 0;
    return on->graph == 0 ? GCK_OK : gck_linked_said(on, on->link->graph_of(on->index, stream, graph));
}

gck_event *gck_event_take(gck_linked *on)
{
    gck_event *event = on->unused;

    if (event != NULL) {
        on->unused = event->next;
        event->open = event->lost = 0;
        return event;
    }
    event = calloc(1, sizeof *event);
    if (gck_linked_said(on, event != NULL ? on->link->event_new(on->index, &event->handle) : GCK_E_MEMORY) != GCK_OK) {
        free(event);
        return NULL;
    }
    event->on = on;
    return event;
}

void gck_event_give(gck_event *event)
{
    if (event != NULL) {
        event->next = event->on->unused;
        event->on->unused = event;
    }
}

int gck_event_record(gck_event *event, void *stream)
{
    gck_linked *on = event->on;
    int status = gck_linked_graph_of(on, stream, &event->graph);

    status = status == GCK_OK ? gck_linked_said(on, on->link->record(on->index, event->handle, stream)) : status;
    event->open |= status == GCK_OK;
    event->lost |= status != GCK_OK;
    return status;
}

void gck_event_lose(gck_event *event) { event->lost = 1; }

int gck_event_wait(const gck_event *event, void *stream)
{
    gck_linked *on = event->on;

    if (event->lost) {
        return on->status;
    }
    uint64_t graph;
    const int status = gck_linked_graph_of(on, stream, &graph);

    if (status != GCK_OK || !event->open || event->graph != graph) {
        return status;
    }
    return gck_linked_said(on, on->link->wait(on->index, stream, event->handle));
}

int gck_event_is_done(gck_event *event)
{
    int done = 0;

    if (event->open && event->on->graph == 0      /* a captured graph runs again */
        && event->on->link->is_done(event->on->index, event->handle, &done) == GCK_OK && done) {
        event->open = 0;
    }
    return !event->open && !event->lost;
}

int gck_event_finish(gck_event *event)
{
    gck_linked *on = event->on;
    const int asked = event->open && event->graph == 0 && !(event->lost && on->graph != 0);
    const int status = asked ? gck_linked_said(on, on->link->finish(on->index, event->handle)) : GCK_OK;

    event->open = event->open && status != GCK_OK;
    return status;
}

void gck_linked_clear(gck_linked *on)
{
    while (on->unused != NULL) {
        gck_event *event = on->unused;
        on->unused = event->next;
        on->link->event_free(on->index, event->handle);
        free(event);
    }
}
