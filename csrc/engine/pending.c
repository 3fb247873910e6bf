/* pending.c: verdicts that come late. */
#include "pending.h"

int gck_pending_begin(gck_payload *p)
{
    if (!p->codec->refuses || p->numel == 0 || (p->device < 0 && !p->state->late_verdicts)) {
        return 0;
    }
    p->verdict = gck_verdict_take(p->device);
    return p->verdict == NULL ? -1 : 0;
}

static void write_verdict(gck_payload *p, uint32_t value) { *(volatile uint32_t *)p->verdict = value; }

void gck_pending_encoded(gck_payload *p, PyObject *x, int status)
{
    if (p->verdict == NULL) {
        return;
    }
    if (status < 0) {                            /* nothing was queued: nobody will write */
        write_verdict(p, GCK_FITS);
        gck_verdict_give(p->verdict);
        p->verdict = NULL;
        return;
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

    if (!p->counted) {
        return;
    }
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

int gck_pending_original(gck_payload *p, PyObject **original)
{
    PyObject *kept, *raised;
    int64_t now = -1;

    *original = NULL;
    if (p->verdict != NULL) {
        settle(p);
    }
    if ((kept = Py_XNewRef(p->kept)) == NULL) {  /* owned: a question runs Python, which may settle p */
        return 0;
    }
    if (p->version >= 0 && gck_version_of(&p->state->py, kept, &now) < 0) {
        Py_DECREF(kept);
        return -1;
    }
    if (now == p->version) {                     /* or an inference tensor: nobody can tell */
        *original = kept;
        return 0;
    }
    /* Changed.  While the verdict is open the payload will do, or decode to NaN. */
    raised = p->refused ? PyObject_CallMethod(p->state->py.shim, "raise_modified", "OL", kept, (long long)p->version)
                        : Py_NewRef(Py_None);
    Py_XDECREF(raised);
    Py_DECREF(kept);
    return raised == NULL ? -1 : 0;
}

PyObject *gck_late_verdicts(PyObject *module, PyObject *on)
{
    const int truth = PyObject_IsTrue(on);

    if (truth < 0) {
        return NULL;
    }
    gck_state_of(module)->late_verdicts = truth;
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
