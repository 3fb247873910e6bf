/* offloader.c: copies out of the ring and into it: when, and for whom. */
#include "offload/offloader.h"

#include "offload/offloader_parts.h"
#include "offload/offloader_graph.h"
#include "offload/store_parts.h"
#include "offload/store_memory.h"
#include "offload/transfer.h"

#include <stdlib.h>

static void lock(gck_offloader *o) { pthread_mutex_lock(&o->store->lock); }
static int  unlock(gck_offloader *o, int status)
{
    pthread_mutex_unlock(&o->store->lock);
    return status;
}

/* The same around work that is queued for a caller on this stream. */
static int enter(gck_offloader *o, void *stream)
{
    lock(o);
    return gck_graph_enter(o, stream);
}

/* 0 or a status: this one if it is none. */
static int leave(gck_offloader *o, int status)
{
    const int left = gck_graph_leave(o);

    return status == 0 ? left : status;
}

/* ---- the ring ---- */

void *gck_offloaded_memory(const gck_offloaded *b)
{
    return gck_ring_memory(&b->offloader->ring, b->ring);
}

int64_t gck_offloader_wants(gck_offloader *o, int64_t nbytes, int payloads)
{
    lock(o);
    nbytes = gck_ring_wants(&o->ring, nbytes, payloads);
    unlock(o, 0);
    return nbytes;
}

int gck_offloader_add(gck_offloader *o, void *memory, int64_t nbytes, void *stream)
{
    int status = GCK_STORE_DEVICE;

    lock(o);
    gck_event *last = gck_event_take(&o->on);
    if (last != NULL && gck_event_record(last, stream) != GCK_OK) {
        gck_event_give(last);
    } else if (last != NULL) {
        status = gck_ring_add(&o->ring, memory, nbytes, last) == 0 ? 0 : GCK_STORE_NO_MEMORY;
    }
    return unlock(o, status);
}

/* ---- copies ---- */

/* Queue a copy, and count it.  0 or a status. */
static int copy_parts(gck_offloaded *b, int64_t from, int64_t nbytes, void *device, void *stream, int out)
{
    gck_offloader *o = b->offloader;
    const gck_transfer what = {&o->on, b->item, b->last, from, nbytes, device, out};

    *(out ? &o->figures.bytes_out : &o->figures.bytes_in) += nbytes;
    ++*(out ? &o->figures.copies_out : &o->figures.copies_in);
    return gck_transfer_queue(&what, stream);
}

static void unhold(gck_offloaded *b)
{
    gck_offloader *o = b->offloader;

    o->held = o->held == b ? b->newer : o->held;
    o->bytes_held -= b->held ? b->size : 0;
    b->held = 0;
}

/* Borrowed: the oldest that is held and not read now; NULL: none. */
static gck_offloaded *oldest_held(gck_offloader *o)
{
    while (o->held != NULL && !o->held->held) {
        o->held = o->held->newer;
    }
    gck_offloaded *b = o->held;
    while (b != NULL && (!b->held || b->readers > 0)) {
        b = b->newer;
    }
    return b;
}

/* Queue the copy out of one that is held; its part of the ring may then be used again.  0 or a status: if the store
 * does not have its bytes, it stays in the ring. */
static int copy_out(gck_offloaded *b)
{
    void *out = b->offloader->out;
    const gck_event *before = b->item->last;     /* in a graph: of what had that memory */
    int used;

    unhold(b);
    if ((before != NULL && GCK_EDGE(GCK_EDGE_MEMORY, gck_event_wait(before, out), GCK_OK) != GCK_OK)
        || GCK_EDGE(GCK_EDGE_COPY_OUT, gck_event_wait(b->last, out), GCK_OK) != GCK_OK
        || copy_parts(b, 0, b->nbytes, gck_offloaded_memory(b), out, 1) != 0) {
        return GCK_STORE_DEVICE;
    }
    used = gck_offloaded_used_by(b, out);
    if (gck_transfer_end(b->item, out) != 0) {
        return GCK_STORE_DEVICE;
    }
    b->copied = 1;
    gck_offloaded_leave_ring(b);
    return used;
}

/* Queue the copy into its part of the ring.  0 or a status: it is not in the ring. */
static int copy_in(gck_offloaded *b)
{
    gck_offloader *o = b->offloader;
    const gck_event *out = b->item->last;
    int flown, used, status = 0;

    if ((out != NULL && GCK_EDGE(GCK_EDGE_COPY_IN, gck_event_wait(out, o->in), GCK_OK) != GCK_OK)
        || copy_parts(b, 0, b->nbytes, gck_offloaded_memory(b), o->in, 0) != 0) {
        status = GCK_STORE_DEVICE;
    } else {
        flown = gck_transfer_end(b->item, o->in);
        used = gck_offloaded_used_by(b, o->in);                /* also where that failed: the copy is queued */
        status = flown != 0 ? flown : used;
        b->graph = o->now;
    }
    if (status != 0) {
        gck_offloaded_leave_ring(b);
    }
    return status;
}

/* ---- writing ---- */

/* Take a part of the ring; copies out make room, then what was read, then what was copied in ahead.  0 or a status. */
static int make_room(gck_offloaded *b, void *stream)
{
    gck_offloader *o = b->offloader;
    int status;

    while ((status = gck_offloaded_take_ring(b, stream)) == GCK_STORE_RING) {
        gck_offloaded *held = gck_graph_is_foreign(o) ? NULL : oldest_held(o);
        if (held != NULL) {
            status = copy_out(held);
        } else if (gck_offloader_evict(o, 0) || gck_offloader_evict(o, 1)) {
            status = 0;
        }
        if (status != 0) {
            break;
        }
    }
    return status;
}

/* Memory of the store.  Only what was copied out can leave it for the file.  0 or a status. */
static int reserve(gck_offloaded *b)
{
    gck_offloader *o = b->offloader;
    gck_offloaded *held;
    int status;

    if (o->on.graph != 0) {
        return gck_graph_reserve(b);
    }
    while ((status = gck_store_reserve(o->store, b->nbytes, &o->out, 0, &b->item)) == GCK_STORE_FULL
           && (held = oldest_held(o)) != NULL) {
        if ((status = copy_out(held)) != 0) {
            break;
        }
    }
    return status;
}

static void drop_item(gck_offloaded *b)
{
    if (b->item != NULL && b->offloader->on.graph != 0) {
        gck_graph_keep(b->offloader, b->item);
    } else if (b->item != NULL) {
        gck_store_drop(b->item);
    }
}

int gck_offloader_take(gck_offloader *o, int64_t nbytes, void *stream, gck_offloaded **bytes)
{
    gck_offloaded *b;
    int status;

    *bytes = NULL;
    if (o->store->process != getpid() || (b = calloc(1, sizeof *b)) == NULL) {
        return o->store->process != getpid() ? GCK_STORE_FORKED : GCK_STORE_NO_MEMORY;
    }
    *b = (gck_offloaded){.offloader = o, .nbytes = nbytes, .size = gck_ring_size(nbytes), .ring = -1, .stream = stream};
    status = enter(o, stream);
    status = status == 0 ? make_room(b, stream) : status;
    o->figures.misses_out += status == GCK_STORE_RING;
    status = leave(o, status == 0 ? reserve(b) : status);
    if (status == 0) {
        b->older = o->newest;
        *(o->newest != NULL ? &o->newest->newer : &o->oldest) = b;
        b->number = o->taken++;
        o->newest = *bytes = b;
    } else {
        gck_offloaded_leave_ring(b);
        drop_item(b);
        free(b);
    }
    return unlock(o, status);
}

int gck_offloaded_written(gck_offloaded *b, void *stream)
{
    gck_offloader *o = b->offloader;
    const int64_t most = o->options.held >= 0 ? o->options.held : o->ring.nbytes / 3;
    int status = enter(o, stream);

    status = gck_offloaded_used_by(b, stream) == 0 ? status : GCK_STORE_DEVICE;
    b->written = 1;
    if (status == 0) {
        o->held = o->held == NULL || b->number < o->held->number ? b : o->held;
        o->bytes_held += b->size;
        b->held = 1;
    }
    for (gck_offloaded *held; status == 0 && o->bytes_held > most && (held = oldest_held(o)) != NULL;) {
        status = copy_out(held);
    }
    return unlock(o, leave(o, status));
}

/* ---- reading ---- */

/* Have it copied in before it is asked for.  0; not 0: there is no room, or its bytes are not in memory. */
static int bring_ahead(gck_offloaded *b)
{
    gck_offloader *o = b->offloader;
    int status = gck_store_hold(b->item, 0);

    if (status != 0) {
        return status;
    }
    do {
        status = gck_offloaded_take_ring(b, o->in);
    } while (status == GCK_STORE_RING && gck_offloader_evict(o, 0));
    if (status == 0 && (status = copy_in(b)) == 0) {
        b->ahead = 1;
    }
    gck_store_release(b->item);
    return status;
}

static void prefetch(const gck_offloaded *read)
{
    gck_offloaded *b = read->older;

    for (int n = 0; b != NULL && n < read->offloader->options.prefetch; b = b->older, n++) {
        if (b->copied && b->ring < 0 && bring_ahead(b) != 0) {
            return;
        }
    }
}

/* It is in the ring, or copied in.  0 or a status. */
static int have_in_ring(gck_offloaded *b)
{
    gck_offloader *o = b->offloader;
    int status;

    if (gck_graph_is_stale(b)) {
        gck_offloaded_leave_ring(b);
    }
    if (b->ring >= 0) {
        return 0;
    }
    if ((status = gck_store_hold(b->item, 1)) != 0) {
        return status;
    }
    if (b->ring < 0) {                           /* else another thread was faster */
        status = make_room(b, o->in);
        status = status == 0 ? copy_in(b) : status;
    }
    gck_store_release(b->item);
    return status;
}

int gck_offloaded_bring(gck_offloaded *b, void *stream)
{
    gck_offloader *o = b->offloader;
    int status;

    if (o->store->process != getpid()) {
        return GCK_STORE_FORKED;
    }
    status = enter(o, stream);
    o->figures.read_in_ring += b->ring >= 0 && !b->copied;
    status = status == 0 ? have_in_ring(b) : status;
    o->figures.misses_in += status == GCK_STORE_RING;
    if (status == 0 && b->last != NULL && GCK_EDGE(GCK_EDGE_READ, gck_event_wait(b->last, stream), GCK_OK) != GCK_OK) {
        status = GCK_STORE_DEVICE;
    }
    if (status == 0) {
        b->at_once |= b->readers > 0;
        b->fixed |= o->now != 0 && gck_graph_is_foreign(o) && !b->copied;
        b->readers++;
        o->figures.prefetched += b->ahead;
        b->ahead = 0;
        if (o->now != 0 || o->on.graph == 0) {   /* what a graph copied is not ahead of a read outside of it */
            prefetch(b);
        }
        status = leave(o, 0);
        b->readers -= status != 0;
    } else {
        leave(o, status);
    }
    return unlock(o, status);
}

static void free_bytes(gck_offloaded *b)
{
    gck_offloader *o = b->offloader;

    unhold(b);
    *(b->older != NULL ? &b->older->newer : &o->oldest) = b->newer;
    *(b->newer != NULL ? &b->newer->older : &o->newest) = b->older;
    if (b->ring >= 0 && !b->written) {           /* an error came between: some of that work may be queued */
        gck_offloaded_used_by(b, b->stream);
    }
    drop_item(b);
    if (b->fixed) {
        gck_graph_fix(b);
    } else {
        gck_offloaded_leave_ring(b);
        free(b);
    }
}

int gck_offloaded_let_go(gck_offloaded *b, void *stream)
{
    gck_offloader *o = b->offloader;
    int status;

    lock(o);
    status = b->at_once ? GCK_EDGE(GCK_EDGE_READS, gck_event_wait(b->last, stream), GCK_OK) : GCK_OK;
    if (status != GCK_OK) {
        gck_event_lose(b->last);                 /* the other read, if it is recorded over */
    }
    status = gck_offloaded_used_by(b, stream) == 0 && status == GCK_OK ? 0 : GCK_STORE_DEVICE;
    if (--b->readers == 0) {
        b->at_once = 0;
        if (b->dropped) {
            free_bytes(b);
        }
    }
    return unlock(o, status);
}

int gck_offloaded_copy(gck_offloaded *b, int64_t from, int64_t nbytes, void *to, void *stream)
{
    gck_offloader *o = b->offloader;
    int status = enter(o, stream);

    if (status == 0 && !b->copied) {
        status = !b->held || gck_graph_is_foreign(o) ? GCK_STORE_DEVICE
               : b->readers > 0 ? GCK_STORE_BUSY : copy_out(b);
    }
    status = status == 0 ? gck_store_hold(b->item, 1) : status;
    if (status == 0) {
        const gck_event *last = b->item->last;
        status = last != NULL && GCK_EDGE(GCK_EDGE_READ_PAST, gck_event_wait(last, stream), GCK_OK) != GCK_OK
              ? GCK_STORE_DEVICE : copy_parts(b, from, nbytes, to, stream, 0);
        status = status == 0 ? gck_transfer_end(b->item, stream) : status;
        gck_store_release(b->item);
    }
    return unlock(o, leave(o, status));
}

int gck_offloaded_is_near(const gck_offloaded *b)
{
    GCK_LOCKED gck_byte_store *locked = gck_store_lock(b->offloader->store);

    return locked != NULL && b->ring >= 0 && !b->copied;
}

/* ---- the end ---- */

void gck_offloaded_drop(gck_offloaded *b)
{
    GCK_LOCKED gck_byte_store *locked = gck_store_lock(b->offloader->store);

    if (locked == NULL) {
        return;
    }
    b->dropped = 1;
    if (b->readers == 0) {
        free_bytes(b);
    }
}

void gck_offloader_free(gck_offloader *o)
{
    if (!gck_store_lock(o->store)) {
        return;
    }
    if (o->on.graph != 0) {
        gck_graph_clear(o);                      /* the store has nothing of it that others could wait for */
    } else {
        gck_store_settle(o->store, &o->on);
    }
    gck_ring_clear(&o->ring);
    unlock(o, 0);
    for (int i = 0; i < 2; i++) {
        void *stream = i == 0 ? o->out : o->in;
        if (stream != NULL) {
            o->on.link->stream_free(o->on.index, stream);
        }
    }
    gck_linked_clear(&o->on);
    free(o);
}

int gck_offloader_is_over(gck_offloader *o)
{
    GCK_LOCKED gck_byte_store *locked = gck_store_lock(o->store);

    return locked != NULL && o->on.graph != 0 && o->alive == 0 && o->oldest == NULL;
}

uint64_t gck_offloader_graph(const gck_offloader *o) { return o->on.graph; }

int gck_offloader_new(const gck_link *link, int index, gck_byte_store *store, const gck_offloader_options *options,
                      gck_offloader **made)
{
    gck_offloader *o = calloc(1, sizeof *o);

    *made = o;
    if (o == NULL) {
        return GCK_STORE_NO_MEMORY;
    }
    *o = (gck_offloader){.on = {.link = link, .index = index, .graph = options->graph}, .store = store,
                         .options = *options, .ring = {.ranges = {.edge = GCK_EDGE_RING}}};
    if (gck_linked_said(&o->on, link->stream_new(index, &o->out)) != GCK_OK
        || gck_linked_said(&o->on, link->stream_new(index, &o->in)) != GCK_OK) {
        return GCK_STORE_DEVICE;                 /* the caller asks for the status, and frees it */
    }
    const int used = options->graph != 0 ? gck_graph_use(o, options->graph, options->stream) : 0;
    if (used != 0) {
        return used;
    }
    lock(o);
    gck_store_pin_for(store, &o->on);
    unlock(o, 0);
    return 0;
}

gck_offloader *gck_offloaded_of(const gck_offloaded *b) { return b->offloader; }
int64_t gck_offloaded_nbytes(const gck_offloaded *b) { return b->nbytes; }
int gck_offloader_status(const gck_offloader *o) { return o->on.status; }

void gck_offloader_read_figures(gck_offloader *o, int restart, gck_offloader_figures *figures)
{
    lock(o);
    *figures = o->figures;
    figures->ring = o->ring.nbytes;
    figures->ring_used = o->ring.taken;
    figures->ring_peak = o->ring.peak;
    if (restart) {
        o->figures = (gck_offloader_figures){.ring_lost = figures->ring_lost};
        o->ring.peak = o->ring.taken;
    }
    unlock(o, 0);
}
