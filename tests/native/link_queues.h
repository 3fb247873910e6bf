/* link_queues.h: a gck_link whose streams are queues in this process.
 *
 * Lazy: works are done one by one, late and in any order that the events allow, as a seed draws it.  Else a thread does
 * the works of each stream.  A call of the link can be made to fail.
 *
 * Beside the bytes it checks the orders themselves, by vector clocks: two accesses to the same cells of memory, of
 * which one writes, are counted as a race when nothing orders them, also where they happened to run in a good order. */
#ifndef LINK_QUEUES_H
#define LINK_QUEUES_H

#include "gradckpt.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUEUES = 16, CELL = 256, CELLS = 1 << 16, REFUSED = 77 };
enum { Q_RUN, Q_RECORD, Q_WAIT };

typedef struct {
    uint32_t at[QUEUES];         /* works of each stream that come before  */
} q_clock;

/* One record of an event: it is what a wait waits for, even if the event is recorded again. */
typedef struct {
    int     refs, done;
    q_clock clock;
} q_point;

typedef struct q_work {
    struct q_work *next;
    int            kind;
    void         (*run)(void *argument);
    void          *argument;
    q_point       *point;
} q_work;

typedef struct {
    int       number, used, running, ending, rank;
    q_work   *first, *last;
    q_clock   clock;
    pthread_t thread;
} q_stream;

typedef struct {
    q_point *point;
} q_event;

typedef struct {
    uintptr_t key;               /* 0: unused                              */
    int       writer;            /* -1: the host, before all that is queued now */
    uint32_t  write, reads[QUEUES];
} q_cell;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t  moved;
    q_stream        streams[QUEUES];
    q_clock         host;        /* works that the host knows to be done   */
    q_cell          cells[CELLS];
    uint64_t        state;
    int             threads;     /* else lazy                              */
    int             eager;       /* of 16: works that are done at each call */
    long            calls, bad_call, races, events, pins, pin_limit;
    int             forever, cells_used;
} q = {.lock = PTHREAD_MUTEX_INITIALIZER, .moved = PTHREAD_COND_INITIALIZER};

/* What a copy in of this thread writes is not checked: it is the caller's own. */
static _Thread_local int q_own;

static uint64_t q_draw(uint64_t *state, uint64_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (*state >> 33) % n;
}

/* ---- orders ---- */

static void q_join(q_clock *into, const q_clock *other)
{
    for (int i = 0; i < QUEUES; i++) {
        into->at[i] = other->at[i] > into->at[i] ? other->at[i] : into->at[i];
    }
}

static q_cell *q_cell_of(uintptr_t key)
{
    size_t i = key * 2654435761u % CELLS;

    while (q.cells[i].key != 0 && q.cells[i].key != key) {
        i = (i + 1) % CELLS;
    }
    if (q.cells[i].key == 0) {
        if (++q.cells_used > CELLS * 3 / 4) {
            abort();
        }
        q.cells[i] = (q_cell){.key = key, .writer = -1};
    }
    return &q.cells[i];
}

/* An access by work `mine` of stream `by` (-1: by the host), which comes after `clock`. */
static void q_access(const void *memory, int64_t nbytes, int writes, const q_clock *clock, int by, uint32_t mine)
{
    int races = 0;

    for (uintptr_t key = (uintptr_t)memory / CELL; key <= ((uintptr_t)memory + (uintptr_t)nbytes - 1) / CELL; key++) {
        q_cell *cell = q_cell_of(key);
        races |= cell->writer >= 0 && cell->write > clock->at[cell->writer];
        for (int i = 0; writes && i < QUEUES; i++) {
            races |= cell->reads[i] > clock->at[i];
        }
        if (writes) {
            *cell = (q_cell){.key = key, .writer = by, .write = mine};
        } else if (by >= 0) {
            cell->reads[by] = mine;
        }
    }
    q.races += races;
}

/* The host reads or writes memory that devices copy from and to. */
static void q_host_access(const void *memory, int64_t nbytes, int writes)
{
    pthread_mutex_lock(&q.lock);
    q_access(memory, nbytes, writes, &q.host, -1, 0);
    pthread_mutex_unlock(&q.lock);
}

/* ---- queues: with the lock ---- */

static void q_point_drop(q_point *point)
{
    if (point != NULL && --point->refs == 0) {
        free(point);
    }
}

static int q_may_run(const q_stream *s)
{
    return s->first != NULL && !s->running && (s->first->kind != Q_WAIT || s->first->point->done);
}

static void q_do_first(q_stream *s)
{
    q_work *work = s->first;

    if (work->kind == Q_RUN) {
        s->running = 1;
        if (q.threads) {
            pthread_mutex_unlock(&q.lock);
        }
        work->run(work->argument);
        if (q.threads) {
            pthread_mutex_lock(&q.lock);
        }
        s->running = 0;
    }
    if (work->kind == Q_RECORD) {
        work->point->done = 1;
    }
    s->first = work->next;
    s->last = s->first != NULL ? s->last : NULL;
    q_point_drop(work->point);
    free(work);
    pthread_cond_broadcast(&q.moved);
}

/* Lazy: do a work of the stream of the lowest rank that can; ranks change now and then.  1, or 0: none can. */
static int q_step(void)
{
    q_stream *found = NULL;

    if (q_draw(&q.state, 64) == 0) {
        q.streams[q_draw(&q.state, QUEUES)].rank = (int)q_draw(&q.state, 1000);
    }
    for (int i = 0; i < QUEUES; i++) {
        q_stream *s = &q.streams[i];
        if (q_may_run(s) && (found == NULL || s->rank < found->rank)) {
            found = s;
        }
    }
    if (found != NULL) {
        q_do_first(found);
    }
    return found != NULL;
}

static void q_await(int (*is)(const void *), const void *what)
{
    while (!is(what)) {
        if (q.threads) {
            pthread_cond_wait(&q.moved, &q.lock);
        } else if (!q_step()) {
            fprintf(stderr, "streams wait for each other\n");
            abort();
        }
    }
}

static int q_is_done(const void *point) { return ((const q_point *)point)->done; }
static int q_is_empty(const void *stream) { return ((const q_stream *)stream)->first == NULL; }

static void *q_work_thread(void *argument)
{
    q_stream *s = argument;

    pthread_mutex_lock(&q.lock);
    while (s->first != NULL || !s->ending) {
        if (q_may_run(s)) {
            q_do_first(s);
        } else {
            pthread_cond_wait(&q.moved, &q.lock);
        }
    }
    pthread_mutex_unlock(&q.lock);
    return NULL;
}

static void q_push(q_stream *s, int kind, void (*run)(void *), void *argument, q_point *point)
{
    q_work *work = malloc(sizeof *work);

    *work = (q_work){NULL, kind, run, argument, point};
    *(s->last != NULL ? &s->last->next : &s->first) = work;
    s->last = work;
    pthread_cond_broadcast(&q.moved);
}

/* ---- what the tests queue ---- */

static void *q_stream_begin(void)
{
    q_stream *s = NULL;

    pthread_mutex_lock(&q.lock);
    for (int i = 0; i < QUEUES && s == NULL; i++) {
        s = q.streams[i].used ? NULL : &q.streams[i];
    }
    if (s == NULL) {
        abort();
    }
    *s = (q_stream){.number = (int)(s - q.streams), .used = 1, .rank = (int)q_draw(&q.state, 1000), .clock = s->clock};
    if (q.threads) {
        pthread_create(&s->thread, NULL, q_work_thread, s);
    }
    pthread_mutex_unlock(&q.lock);
    return s;
}

static void q_stream_end(void *stream)
{
    q_stream *s = stream;

    pthread_mutex_lock(&q.lock);
    q_await(q_is_empty, s);
    s->ending = 1;
    pthread_cond_broadcast(&q.moved);
    pthread_mutex_unlock(&q.lock);
    if (q.threads) {
        pthread_join(s->thread, NULL);
    }
    pthread_mutex_lock(&q.lock);
    s->used = 0;
    pthread_mutex_unlock(&q.lock);
}

/* All that was queued is done, and the host knows it. */
static void q_drain(void)
{
    pthread_mutex_lock(&q.lock);
    for (int i = 0; i < QUEUES; i++) {
        q_await(q_is_empty, &q.streams[i]);
        q.host.at[i] = q.streams[i].clock.at[i];
    }
    pthread_mutex_unlock(&q.lock);
}

/* Queue a work which reads (from) and writes (to) memory; NULL: none. */
static void q_run(void *stream, void (*run)(void *), void *argument, const void *from, void *to, int64_t nbytes)
{
    q_stream *s = stream;

    pthread_mutex_lock(&q.lock);
    q_join(&s->clock, &q.host);
    s->clock.at[s->number]++;
    if (from != NULL) {
        q_access(from, nbytes, 0, &s->clock, s->number, s->clock.at[s->number]);
    }
    if (to != NULL) {
        q_access(to, nbytes, 1, &s->clock, s->number, s->clock.at[s->number]);
    }
    q_push(s, Q_RUN, run, argument, NULL);
    pthread_mutex_unlock(&q.lock);
}

/* ---- the link ---- */

/* Begin a call of the link; some works are done meanwhile.  1: it fails. */
static int q_fails(void)
{
    int bad;

    pthread_mutex_lock(&q.lock);
    bad = ++q.calls == q.bad_call || (q.forever && q.bad_call > 0 && q.calls > q.bad_call);
    while (!q.threads && q_draw(&q.state, 16) < (uint64_t)q.eager && q_step()) {
    }
    pthread_mutex_unlock(&q.lock);
    return bad;
}

static int q_stream_new(int index, void **stream)
{
    if (q_fails()) {
        return REFUSED;
    }
    *stream = q_stream_begin();
    return GCK_OK;
}

static void q_stream_free(int index, void *stream)
{
    q_stream_end(stream);
}

static int q_event_new(int index, void **event)
{
    if (q_fails() || (*event = calloc(1, sizeof(q_event))) == NULL) {
        return REFUSED;
    }
    __atomic_add_fetch(&q.events, 1, __ATOMIC_RELAXED);
    return GCK_OK;
}

static void q_event_free(int index, void *event)
{
    pthread_mutex_lock(&q.lock);
    q_point_drop(((q_event *)event)->point);
    pthread_mutex_unlock(&q.lock);
    free(event);
    __atomic_sub_fetch(&q.events, 1, __ATOMIC_RELAXED);
}

static int q_record(int index, void *event, void *stream)
{
    q_stream *s = stream;
    q_event *e = event;

    if (q_fails()) {
        return REFUSED;
    }
    pthread_mutex_lock(&q.lock);
    q_point_drop(e->point);
    e->point = malloc(sizeof *e->point);
    *e->point = (q_point){.refs = 2, .clock = s->clock};
    q_push(s, Q_RECORD, NULL, NULL, e->point);
    pthread_mutex_unlock(&q.lock);
    return GCK_OK;
}

static int q_wait(int index, void *stream, void *event)
{
    q_stream *s = stream;
    q_event *e = event;

    if (q_fails()) {
        return REFUSED;
    }
    pthread_mutex_lock(&q.lock);
    if (e->point != NULL) {
        e->point->refs++;
        q_join(&s->clock, &e->point->clock);
        q_push(s, Q_WAIT, NULL, NULL, e->point);
    }
    pthread_mutex_unlock(&q.lock);
    return GCK_OK;
}

static int q_ask(int index, void *event, int *done)
{
    q_event *e = event;

    if (q_fails()) {
        return REFUSED;
    }
    pthread_mutex_lock(&q.lock);
    *done = e->point == NULL || e->point->done;
    if (*done && e->point != NULL) {
        q_join(&q.host, &e->point->clock);
    }
    pthread_mutex_unlock(&q.lock);
    return GCK_OK;
}

static int q_finish(int index, void *event)
{
    q_event *e = event;

    if (q_fails()) {
        return REFUSED;
    }
    pthread_mutex_lock(&q.lock);
    if (e->point != NULL) {
        q_point *point = e->point;               /* the event may be recorded again meanwhile */
        point->refs++;
        q_await(q_is_done, point);
        q_join(&q.host, &point->clock);
        q_point_drop(point);
    }
    pthread_mutex_unlock(&q.lock);
    return GCK_OK;
}

typedef struct {
    void       *to;
    const void *from;
    int64_t     nbytes;
} q_copy_work;

static void q_copy_run(void *argument)
{
    q_copy_work *w = argument;

    memcpy(w->to, w->from, (size_t)w->nbytes);
    free(w);
}

static int q_copy(int index, void *stream, void *to, const void *from, int64_t nbytes)
{
    q_copy_work *w;

    if (q_fails()) {
        return REFUSED;
    }
    w = malloc(sizeof *w);
    *w = (q_copy_work){to, from, nbytes};
    q_run(stream, q_copy_run, w, from, q_own ? NULL : to, nbytes);
    return GCK_OK;
}

static int q_pin(int index, void *memory, int64_t nbytes)
{
    if (q_fails() || q.pins >= q.pin_limit) {
        return REFUSED;
    }
    q.pins++;
    return GCK_OK;
}

static void q_unpin(int index, void *memory)
{
    q.pins--;
}

static const gck_link q_link = {
    .stream_new = q_stream_new, .stream_free = q_stream_free, .event_new = q_event_new, .event_free = q_event_free,
    .record = q_record, .wait = q_wait, .is_done = q_ask, .finish = q_finish, .copy_out = q_copy, .copy_in = q_copy,
    .pin = q_pin, .unpin = q_unpin,
};

/* Begin anew: no stream is in use, and nothing is known of any memory. */
static void q_begin(uint64_t seed, int threads, int eager)
{
    q.state = seed * 7919 + 1;
    q.threads = threads;
    q.eager = eager;
    q.calls = q.bad_call = q.forever = q.cells_used = 0;
    q.pins = 0;
    q.pin_limit = 1 << 20;
    memset(q.cells, 0, sizeof q.cells);
    memset(&q.host, 0, sizeof q.host);
    memset(q.streams, 0, sizeof q.streams);
}

#endif
