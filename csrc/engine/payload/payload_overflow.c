/* payload_overflow.c: overflow results that a device reports late. */
#include "engine/payload/payload_overflow.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/input.h"
#include "torch/simulated.h"
#include "torch/tensor.h"
#include "engine/payload/payload_sizes.h"

#include <time.h>

enum {
    MOST_OPEN = 2,                 /* originals of a device that may be held until their results come ... */
    SMALL = 16 << 20,              /* ... and any number whose bytes together are fewer, in a real step */
    MOST_TWINS = 1,                /* the same of payloads that may turn out to be another's     */
    /* Seconds.  A region may take ten; a device that stands still may wait for what this thread has yet to queue. */
    PATIENCE = 60,
    LONGEST = 600,                 /* where no other source has the values */
};
static const int64_t SECOND = 1000000000;

/* 1 when it got a word. */
static int take(gck_payload *p)
{
    Py_BEGIN_ALLOW_THREADS                       /* the first one of a device allocates memory */
    p->overflow = gck_overflow_take(p->device);
    Py_END_ALLOW_THREADS
    return p->overflow != NULL;
}

int gck_payload_overflow_begin(gck_payload *p)
{
    if (!p->codec->may_overflow || p->numel == 0 || (!gck_counts_as_device(p->device) && !p->state->late_overflow)) {
        return 0;
    }
    return take(p) ? 0 : -1;
}

static void write_flag(gck_payload *p, uint32_t value) { *(volatile uint32_t *)p->overflow = value; }

/* Its word is open. */
static void wait_for(gck_payload *p)
{
    p->next_pending = p->state->pending;
    p->state->pending = p;
}

/* No work will write its word. */
static void cancel(gck_payload *p)
{
    write_flag(p, GCK_OVERFLOW_NONE);
    gck_overflow_give(p->overflow);
    p->overflow = NULL;
}

void gck_payload_overflow_encoded(gck_payload *p, PyObject *x, int status)
{
    if (p->overflow == NULL) {
        return;
    }
    if (status < 0) {
        write_flag(p, GCK_OVERFLOW_NONE);      /* nothing was queued, so nothing will write the word, and p dies */
    }
    p->late |= status == 0 ? GCK_OVERFLOW_NONE : GCK_OVERFLOW_FOUND;
    p->kept = Py_NewRef(x);
    wait_for(p);
}

/* A simulated step gives each answer when it is waited for, so as many originals are held as ever may be. */
static void answer_simulated(gck_payload *p)
{
    if (p->overflow != NULL && gck_is_simulated()) {
        write_flag(p, p->late);
    }
}

/* Take p off the list and give its word back. */
static void leave(gck_payload *p)
{
    gck_payload **link = &p->state->pending;

    while (*link != NULL && *link != p) {
        link = &(*link)->next_pending;
    }
    if (*link == p) {
        *link = p->next_pending;
    }
    gck_overflow_give(p->overflow);
    p->overflow = NULL;
}

void gck_payload_overflow_forget(gck_payload *p)
{
    if (p->overflow != NULL) {
        leave(p);
    }
}

/* Undo that it was counted as compressed. */
static void count_overflow(gck_payload *p)
{
    gck_stats *s = &p->state->stats;

    p->counted = 0;
    gck_payload_uncount(p);
    if (p->epoch == p->state->epoch) {           /* else reset_stats() has dropped it */
        gck_payload_count_encoded(p, -p->fresh);
        s->shared -= p->uses - p->fresh;
        s->compressed -= p->uses;
        s->uncompressed[gck_is_sized_late(p) ? GCK_SKIP_DENSE : GCK_SKIP_OVERFLOW] += p->uses;
        s->uncompressed_bytes += p->uses * p->bytes_in;
    }
}

/* A rounding codec keeps its bytes too: they hold the values that did not overflow. */
static void overflow(gck_payload *p)
{
    p->overflowed = 1;
    count_overflow(p);
    if (p->codec->max_error == 0 || p->codec->counted != NULL) {     /* too little room: nothing is there */
        gck_arrays_clear(&p->arrays);
        gck_arrays_clear(&p->saved);
        gck_placed_drop(&p->placed);
    }
}

/* ---- twins ---- */

static int compare(const gck_payload *self, gck_bytes mine, gck_bytes firsts)
{
    const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(self->device));
    int status;

    Py_BEGIN_ALLOW_THREADS                       /* a launch may wait for room in a queue */
    status = kind->compare(gck_device_index(self->device), self->stream, mine, firsts, self->lengths, self->overflow);
    Py_END_ALLOW_THREADS
    return status;
}

/* Queue the question, if both have their bytes.  0 or -1. */
static int ask(gck_payload *self, gck_payload *first)
{
    gck_arrays arrays = {.codes = NULL}, others = {.codes = NULL};
    gck_bytes mine, firsts;
    int read = gck_payload_read(self, self->stream, &arrays), status = 0;

    read = read > 0 ? gck_payload_read(first, self->stream, &others) : read;
    if (read > 0 && take(self)) {
        status = gck_payload_view(self, arrays, &mine) < 0 || gck_payload_view(first, others, &firsts) < 0 ? -1 : 0;
        if (status == 0 && compare(self, mine, firsts) == GCK_OK) {
            self->twin = (gck_payload *)Py_NewRef((PyObject *)first);
            wait_for(self);
        } else {
            cancel(self);
        }
    }
    status = gck_payload_has_read(first, self->stream, &others, read < 0 ? -1 : status);
    return gck_payload_has_read(self, self->stream, &arrays, status);
}

int gck_payload_overflow_ask(gck_payload *self, gck_payload *first)
{
    const gck_device_kind *kind = self->device >= 0 ? gck_device_kind_at(gck_device_kind_of(self->device)) : NULL;
    GCK_CLEARED_BY(gck_arrays_clear) gck_arrays arrays = {.codes = NULL};

    /* In a simulated step one tensor of one version is the same, also where it is small and has values. */
    if (!self->has_values || kind == NULL) {
        if ((self->overflow = gck_overflow_take(-1)) != NULL) {
            self->late = GCK_OVERFLOW_NONE;
            self->twin = (gck_payload *)Py_NewRef((PyObject *)first);
            wait_for(self);
        }
        return 0;
    }
    if (kind->compare == NULL || self->overflow != NULL || self->nbytes != first->nbytes) {
        return 0;
    }
    /* When the answer comes, its memory is let go: a decode that runs then holds Python tensors of it. */
    if (!gck_is_placed(&self->placed) && gck_payload_arrays(self, &arrays) < 0) {
        return -1;
    }
    return ask(self, first);
}

/* The answer came. */
static void settle_twin(gck_payload *self, int equal)
{
    gck_payload *first = self->twin;

    if (!equal) {                                /* written to since, where no version tells */
        self->twin = NULL;
        gck_payload_forget(first);
        if (self->version >= 0) {
            gck_payload_remember(self);
        }
        Py_DECREF((PyObject *)first);
        return;
    }
    self->merged = 1;
    gck_payload_uncount(self);
    if (self->epoch == self->state->epoch) {     /* else reset_stats() has dropped it */
        self->state->stats.shared += self->fresh;
        gck_payload_count_encoded(self, -self->fresh);
        self->fresh = 0;
    }
    gck_arrays_clear(&self->arrays);
    gck_fresh_free(&self->own);
}

/* ---- answers ---- */

/* 1 when p's flag was written: p is no longer in the list, and may be freed. */
static int settle(gck_payload *p)
{
    const uint32_t flag = *(volatile uint32_t *)p->overflow;

    if (flag == GCK_OVERFLOW_PENDING) {
        return 0;
    }
    GCK_SCOPED PyObject *held = Py_NewRef((PyObject *)p);      /* releasing references may run Python */
    leave(p);
    if (p->twin != NULL) {
        settle_twin(p, gck_overflow_answer(flag) == GCK_OVERFLOW_NONE);
        return 1;
    }
    gck_payload_room_learn(p, gck_overflow_part(flag));
    if (gck_overflow_answer(flag) == GCK_OVERFLOW_FOUND) {
        overflow(p);
    } else {
        Py_CLEAR(p->kept);
    }
    return 1;
}

void gck_payload_overflow_poll(gck_state *state)
{
    gck_payload *p = state->pending;

    while (p != NULL) {
        p = settle(p) ? state->pending : p->next_pending;   /* Python has run: begin again */
    }
}

/* Let other threads run until p's flag was written: 1; 0 when none came for `seconds`, or a
 * captured graph will write it; -1 with an exception, because Ctrl-C is checked. */
static int await(gck_payload *p, int seconds)
{
    const volatile uint32_t *word = p->overflow;
    struct timespec pause = {0, 10000};
    int64_t patience = p->state->late_overflow ? p->state->late_overflow : seconds * SECOND;

    answer_simulated(p);
    while (p->overflow != NULL && *word == GCK_OVERFLOW_PENDING) {         /* another thread may have settled p */
        if (patience < 0 || gck_overflow_is_captured(p->overflow)) {
            return 0;
        }
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&pause, NULL);
        Py_END_ALLOW_THREADS
        patience -= pause.tv_nsec;
        pause.tv_nsec += pause.tv_nsec < 500000 ? pause.tv_nsec : 0;
    }
    return 1;
}

/* Borrowed: the oldest open payload of its device, if too many are open; else NULL. */
static gck_payload *oldest_of_too_many(const gck_payload *newest)
{
    gck_payload *oldest = NULL;
    int64_t bytes = 0;
    int open = 0;

    for (gck_payload *p = newest->state->pending; p != NULL; p = p->next_pending) {
        if (p->device == newest->device && p->counted && !p->timed_out
            && (p->twin != NULL) == (newest->twin != NULL)) {
            oldest = p;
            open++;
            bytes += p->twin != NULL ? p->nbytes : p->bytes_in;
        }
    }
    return open > (newest->twin != NULL ? MOST_TWINS : MOST_OPEN) && (bytes > SMALL || gck_is_simulated())
         ? oldest : NULL;
}

int gck_payload_overflow_bound(gck_payload *newest)
{
    gck_state *state = newest->state;
    gck_payload *p;
    int came = 0;

    while (came >= 0 && (p = oldest_of_too_many(newest)) != NULL) {
        Py_INCREF((PyObject *)p);
        came = await(p, PATIENCE);
        p->timed_out = came == 0;
        Py_DECREF((PyObject *)p);
        gck_payload_overflow_poll(state);
    }
    return came < 0 ? -1 : 0;
}

int gck_payload_overflow_original(gck_payload *p, PyObject **original)
{
    PyObject *kept;
    int64_t now = -1;
    int came = 1;

    answer_simulated(p);
    for (*original = NULL; came > 0; Py_DECREF(kept)) {
        gck_payload_overflow_poll(p->state);
        if ((kept = Py_XNewRef(p->kept)) == NULL) {      /* owned: a question runs Python, which may settle p */
            return 0;
        }
        if (p->version >= 0 && gck_version_of(&p->state->py, kept, &now) < 0) {
            came = -1;
        } else if (now == p->version) {                  /* or an inference tensor, which has no version */
            *original = kept;
            return 0;
        } else if ((came = await(p, LONGEST)) == 0 || p->overflowed) {
            /* The original was changed, and the payload does not hold its values, or only a graph
             * will tell. */
            Py_XDECREF(PyObject_CallFunction(p->state->py.call.raise_modified, "OL", kept, (long long)p->version));
            came = -1;
        }
    }
    return -1;
}

PyObject *gck_late_overflow(PyObject *module, PyObject *seconds)
{
    const double patience = PyFloat_AsDouble(seconds);

    if (patience == -1 && PyErr_Occurred()) {
        return NULL;
    }
    gck_state_of(module)->late_overflow = (int64_t)(patience * (double)SECOND);
    Py_RETURN_NONE;
}

PyObject *gck_settle_overflow(PyObject *module, PyObject *Py_UNUSED(unused))
{
    for (gck_payload *p = gck_state_of(module)->pending; p != NULL; p = p->next_pending) {
        if (p->device < 0) {
            write_flag(p, p->late);
        }
    }
    Py_RETURN_NONE;
}
