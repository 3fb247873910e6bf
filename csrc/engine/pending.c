/* pending.c: verdicts that come late. */
#include "pending.h"

#include <time.h>

enum {
    MOST_OPEN = 2,                 /* originals of a device that may wait for their verdicts ... */
    SMALL = 16 << 20,              /* ... and any number that has fewer bytes together           */
};
static const int64_t SECOND = 1000000000;

int gck_pending_begin(gck_payload *p)
{
    if (!p->codec->refuses || p->numel == 0 || (p->device < 0 && !p->state->late_verdicts)) {
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS                       /* the first one of a device allocates memory */
    p->verdict = gck_verdict_take(p->device);
    Py_END_ALLOW_THREADS
    return p->verdict == NULL ? -1 : 0;
}

static void write_verdict(gck_payload *p, uint32_t value) { *(volatile uint32_t *)p->verdict = value; }

void gck_pending_encoded(gck_payload *p, PyObject *x, int status)
{
    if (p->verdict == NULL) {
        return;
    }
    if (status < 0) {
        write_verdict(p, GCK_FITS);              /* nothing was queued: nobody will write, and p goes */
    }
    p->late = status == 0 ? GCK_FITS : GCK_REFUSED;
    p->kept = Py_NewRef(x);
    p->next_pending = p->state->pending;
    p->state->pending = p;
}

/* Takes p off the list and gives its word back. */
static void leave(gck_payload *p)
{
    gck_payload **link = &p->state->pending;

    while (*link != NULL && *link != p) {
        link = &(*link)->next_pending;
    }
    if (*link == p) {
        *link = p->next_pending;
    }
    gck_verdict_give(p->verdict);
    p->verdict = NULL;
}

void gck_pending_forget(gck_payload *p)
{
    if (p->verdict != NULL) {
        leave(p);
    }
}

/* It was counted as compressed, in the hope that it fits. */
static void count_refused(gck_payload *p)
{
    gck_stats *s = &p->state->stats;

    p->counted = 0;
    gck_payload_uncount(p);
    if (p->epoch == p->state->epoch) {           /* else reset_stats() has forgotten it */
        s->encoded -= p->fresh;
        s->bytes_in -= p->fresh ? p->bytes_in : 0;
        s->bytes_out -= p->fresh ? p->nbytes : 0;
        s->shared -= p->uses - p->fresh;
        s->compressed -= p->uses;
        s->kept[GCK_KEEP_FIT] += p->uses;
        s->kept_bytes += p->uses * p->bytes_in;
    }
}

/* A codec that rounds keeps its bytes, too: the values that it could hold are theirs. */
static void refuse(gck_payload *p)
{
    p->refused = 1;
    count_refused(p);
    if (p->codec->max_error == 0) {
        Py_CLEAR(p->buffer);
        Py_CLEAR(p->saved);
    }
}

/* 1 when p's verdict has come: p is no longer in the list, and may be gone. */
static int settle(gck_payload *p)
{
    const uint32_t verdict = *(volatile uint32_t *)p->verdict;

    if (verdict == GCK_PENDING) {
        return 0;
    }
    Py_INCREF((PyObject *)p);                    /* what is let go of may run Python */
    leave(p);
    if (verdict == GCK_REFUSED) {
        refuse(p);
    } else {
        Py_CLEAR(p->kept);
    }
    Py_DECREF((PyObject *)p);
    return 1;
}

void gck_pending_poll(gck_state *state)
{
    gck_payload *p = state->pending;

    while (p != NULL) {
        p = settle(p) ? state->pending : p->next_pending;   /* Python has run: from the start */
    }
}

/* Lets others run until p's verdict has come: 1; 0 when there was none for `seconds`, or a captured graph will bring it;
 * -1 with an exception, since Ctrl-C is heard. */
static int await(gck_payload *p, int seconds)
{
    const volatile uint32_t *word = p->verdict;
    struct timespec pause = {0, 10000};
    int64_t patience = p->state->late_verdicts ? p->state->late_verdicts : seconds * SECOND;

    while (p->verdict != NULL && *word == GCK_PENDING) {         /* another thread may have settled p */
        if (patience < 0 || gck_verdict_is_captured(p->verdict)) {
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

/* Borrowed: of the open ones of its device the oldest, if there are too many; else NULL. */
static gck_payload *oldest_of_too_many(const gck_payload *newest)
{
    gck_payload *oldest = NULL;
    int64_t bytes = 0;
    int open = 0;

    for (gck_payload *p = newest->state->pending; p != NULL; p = p->next_pending) {
        if (p->device == newest->device && p->counted && !p->unheard) {
            oldest = p;
            open++;
            bytes += p->bytes_in;
        }
    }
    return open > MOST_OPEN && bytes > SMALL ? oldest : NULL;
}

int gck_pending_bound(gck_payload *newest)
{
    gck_state *state = newest->state;
    gck_payload *p;
    int came = 0;

    while (came >= 0 && (p = oldest_of_too_many(newest)) != NULL) {
        Py_INCREF((PyObject *)p);
        came = await(p, 1);
        p->unheard = came == 0;
        Py_DECREF((PyObject *)p);
        gck_pending_poll(state);
    }
    return came < 0 ? -1 : 0;
}

int gck_pending_original(gck_payload *p, PyObject **original)
{
    PyObject *kept, *raised;
    int64_t now = -1;
    int came = 1;

    for (*original = NULL; came > 0; Py_DECREF(kept)) {
        gck_pending_poll(p->state);
        if ((kept = Py_XNewRef(p->kept)) == NULL) {      /* owned: a question runs Python, which may settle p */
            return 0;
        }
        if (p->version >= 0 && gck_version_of(&p->state->py, kept, &now) < 0) {
            came = -1;
        } else if (now == p->version) {                  /* or an inference tensor: nobody can tell */
            *original = kept;
            return 0;
        } else if ((came = await(p, 600)) == 0 || p->refused) {
            /* Changed, and the payload does not hold its values, or a graph alone will tell. */
            raised = PyObject_CallMethod(p->state->py.shim, "raise_modified", "OL", kept, (long long)p->version);
            Py_XDECREF(raised);
            came = -1;
        }
    }
    return -1;
}

PyObject *gck_late_verdicts(PyObject *module, PyObject *seconds)
{
    const double patience = PyFloat_AsDouble(seconds);

    if (patience == -1 && PyErr_Occurred()) {
        return NULL;
    }
    gck_state_of(module)->late_verdicts = (int64_t)(patience * (double)SECOND);
    Py_RETURN_NONE;
}

PyObject *gck_settle_verdicts(PyObject *module, PyObject *unused)
{
    (void)unused;
    for (gck_payload *p = gck_state_of(module)->pending; p != NULL; p = p->next_pending) {
        if (p->device < 0) {
            write_verdict(p, p->late);
        }
    }
    Py_RETURN_NONE;
}
