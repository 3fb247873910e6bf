/* call_matching.c: which call of the forward a call of the recompute is.
 *
 * A call is one of the forward's with its kind and, where both runs know it, its stamp: if all that
 * the region saves proves equal, corresponding calls have equal stamps.  The first in order is
 * taken.  At the end the last possible ones are looked for, too: where these are others, the
 * recompute left calls out, and it matters which. */
#include "engine/selective/call_matching.h"

#include "torch/calls.h"

#include <stdlib.h>

int gck_matching_begin(gck_matching *m, const gck_op_storage *store, const gck_run *run)
{
    *m = (gck_matching){.n = store->ncalls, .stamped = run != NULL && run->saved != NULL && store->stamped,
                        .laid_anew = run != NULL && run->laid_anew};
    m->matches = calloc((size_t)m->n + 1, sizeof *m->matches);
    if (m->matches == NULL) {
        m->n = 0;
        return gck_done(PyErr_NoMemory());
    }
    return 0;
}

void gck_matching_end(gck_matching *m)
{
    gck_match *matches = m->matches;
    const Py_ssize_t n = m->n;

    m->matches = NULL;
    m->n = m->made = 0;
    Py_CLEAR(m->surplus);
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_XDECREF(matches[i].given);
    }
    free(matches);
}

/* 1 when a call of that kind and stamp can be this one of the forward. */
static int fits(const gck_matching *m, const gck_recorded_call *of, const gck_call_kind *kind, Py_ssize_t stamp,
                gck_likeness likeness)
{
    return of->kind.call == kind->call && (!m->stamped || of->stamp == stamp)
        && (m->laid_anew || of->kind.strides == kind->strides)
        && (likeness < GCK_LIKE_CONSTANTS || of->kind.floats == kind->floats)
        && (likeness < GCK_LIKE_ARGUMENTS || of->kind.given == kind->given);
}

static Py_ssize_t search(const gck_matching *m, const gck_op_storage *store, const gck_call *call,
                         gck_likeness likeness)
{
    for (Py_ssize_t step = 0, i = m->next; step < m->n; step++, i++) {
        i = i < m->n ? i : 0;
        if (!m->matches[i].used && fits(m, &store->calls[i], &call->kind, call->stamp, likeness)) {
            return i;
        }
    }
    return GCK_NO_MATCH;
}

/* How many calls of the forward this one can be, used or not.  *kept: something is kept of one. */
static Py_ssize_t count(const gck_matching *m, const gck_op_storage *store, const gck_call *call, int *kept)
{
    Py_ssize_t found = 0;

    *kept = 0;
    for (Py_ssize_t i = 0; i < m->n; i++) {
        if (fits(m, &store->calls[i], &call->kind, call->stamp, GCK_LIKE_CONSTANTS)) {
            *kept |= store->calls[i].entry != store->state->py.recompute_mark;
            found++;
        }
    }
    return found;
}

/* What torch calls the invocation index of the next call of an operator. */
static int index_of(const gck_matching *m, const gck_op_storage *store, const PyObject *key)
{
    int index = 0;

    for (Py_ssize_t i = 0; i < m->n; i++) {
        index += m->matches[i].used && store->calls[i].key == key;
    }
    return index;
}

Py_ssize_t gck_matching_find(gck_matching *m, gck_op_storage *store, const gck_call *call)
{
    gck_likeness likeness = GCK_LIKE_CONSTANTS;
    Py_ssize_t i = m->n <= store->ncalls ? search(m, store, call, likeness) : GCK_NO_MATCH, rival, found;
    int kept = 0;

    if (i < 0) {
        found = count(m, store, call, &kept);
        if (found > 0 && kept) {
            m->often = found;
            m->surplus = m->surplus != NULL ? m->surplus : Py_NewRef(call->key);
            gck_done(PyObject_CallFunction(store->state->py.call.raise_torchs, "sOiii", "no_entry", call->key,
                                           index_of(m, store, call->key), 1, 0));
            return -1;
        }
        likeness = GCK_LIKE_CALLS;
        i = found == 0 ? search(m, store, call, likeness) : GCK_NO_MATCH;
    }
    if (i >= 0) {
        rival = store->calls[i].kind.given != call->kind.given ? search(m, store, call, GCK_LIKE_ARGUMENTS) : i;
        m->matches[m->made].rival = rival == i ? GCK_NO_MATCH : rival;
        m->rivals += rival >= 0 && rival != i;
        m->disordered |= i < m->next;
        m->next = i >= m->next ? i + 1 : m->next;
        m->matches[i].used = 1;
        m->matches[m->made].of = i;
        m->matches[m->made++].likeness = likeness;
    }
    return i;
}

/* 1 when another call of the forward is of the kind and stamp of this one. */
static int has_double(const gck_matching *m, const gck_op_storage *store, Py_ssize_t index)
{
    const gck_recorded_call *of = &store->calls[index];

    for (int step = -1; step <= 1; step += 2) {          /* equal stamps lie together */
        for (Py_ssize_t i = index + step; i >= 0 && i < m->n && store->calls[i].stamp == of->stamp; i += step) {
            if (store->calls[i].kind.call == of->kind.call) {
                return 1;
            }
        }
    }
    return 0;
}

void gck_matching_consume(gck_matching *m, gck_op_storage *store, Py_ssize_t index)
{
    if (m->stamped && has_double(m, store, index)) {     /* without stamps too many would live on */
        m->matches[index].given = Py_NewRef(store->calls[index].entry);
    }
    gck_op_storage_keep(store, index, Py_NewRef(store->state->py.consumed_mark));
}

/* ---- the judgement ---- */

static int raise_ambiguous(const gck_op_storage *store, PyObject *key, Py_ssize_t forward, Py_ssize_t recompute)
{
    gck_done(PyObject_CallFunction(store->state->py.call.raise_ambiguous, "Onn", key, forward, recompute));
    return -1;
}

/* New references: what was, or would be, handed out for a call. */
static PyObject *handed_out(const gck_matching *m, const gck_op_storage *store, Py_ssize_t i)
{
    PyObject *entry = m->matches[i].given != NULL ? m->matches[i].given : store->calls[i].entry;
    PyObject *drawn = store->calls[i].drawn;

    return PyTuple_Pack(2, entry, drawn != NULL ? drawn : Py_None);
}

/* Calls i and j of the forward can both be the one that was matched with i: is it all the same?  0,
 * or -1 with the error. */
static int compare_pair(const gck_matching *m, gck_op_storage *store, Py_ssize_t i, Py_ssize_t j,
                      gck_likeness likeness)
{
    const gck_py *py = &store->state->py;
    GCK_SCOPED PyObject *one = handed_out(m, store, i), *other = one != NULL ? handed_out(m, store, j) : NULL;
    const int gone = other != NULL && PyTuple_GetItem(one, 0) == py->consumed_mark;
    const int same = other == NULL ? -1 : gone ? 0 : PyTuple_GetItem(one, 0) == PyTuple_GetItem(other, 0) ? 1
                   : gck_is_true(PyObject_CallFunction(py->call.are_alike, "OO", one, other));
    Py_ssize_t forward = 0, recompute = 0;

    if (same != 0) {
        return same < 0 ? -1 : 0;
    }
    for (Py_ssize_t k = 0; k < m->n; k++) {
        const int alike = fits(m, &store->calls[k], &store->calls[i].kind, store->calls[i].stamp, likeness);
        forward += alike;
        recompute += alike && m->matches[k].used;
    }
    return raise_ambiguous(store, store->calls[i].key, forward, recompute);
}

int gck_matching_compare(const gck_matching *m, gck_op_storage *store, int stopped)
{
    Py_ssize_t last = m->n;
    int status = 0;

    if (m->surplus != NULL) {                    /* also where the region's function caught that error */
        return raise_ambiguous(store, m->surplus, m->often, m->often + 1);
    }
    /* without stamps it is not known which calls a stop has cut off: the order alone counts */
    for (Py_ssize_t k = 0; status == 0 && m->rivals > 0 && k < m->made; k++) {     /* by order, or by arguments? */
        if (m->matches[k].rival >= 0) {
            status = compare_pair(m, store, m->matches[k].of, m->matches[k].rival, GCK_LIKE_CONSTANTS);
        }
    }
    if (status < 0 || m->made == m->n || (stopped && !m->stamped) || store->ncalls < m->n) {
        return status;
    }
    for (Py_ssize_t k = m->made - 1; status == 0 && k >= 0; k--) {
        const Py_ssize_t i = m->matches[k].of;
        const gck_likeness likeness = m->matches[k].likeness;
        Py_ssize_t latest = -1;

        for (Py_ssize_t j = last - 1; status == 0 && j >= 0 && (j > i || m->disordered); j--) {
            if (j != i && (!m->disordered || !m->matches[j].used)
                && fits(m, &store->calls[j], &store->calls[i].kind, store->calls[i].stamp, likeness)) {
                latest = latest < 0 ? j : latest;
                status = compare_pair(m, store, i, j, likeness);
            }
        }
        last = m->disordered ? m->n : latest >= 0 ? latest : i;
    }
    return status;
}
