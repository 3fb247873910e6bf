/* unseen_views.c: views of kept outputs that have version counters of their own. */
#include "engine/selective/unseen_views.h"

#include "torch/calls.h"
#include "torch/input.h"
#include "engine/selective/active_storage.h"
#include "engine/selective/op_hiding.h"

int gck_makes_unseen_views(const gck_py *py, const PyObject *op)
{
    const Py_ssize_t n = PyTuple_Size(py->unseen_views);
    Py_ssize_t i = 0;

    while (i < n && PyTuple_GetItem(py->unseen_views, i) != op) {
        i++;
    }
    return i < n;
}

/* New reference: an alias of x, made unseen by regions and modes. */
static PyObject *alias_of(gck_state *state, PyObject *x)
{
    PyObject *modes, *alias;

    if (gck_hide_begin(state, &modes) < 0) {
        return NULL;
    }
    alias = gck_op_output_alias(&state->py, x);
    if (gck_hide_end(state, modes) < 0) {
        Py_CLEAR(alias);
    }
    return alias;
}

/* The outputs in that entry whose memory x touches remember it.  Addresses are compared while the
 * output holds its memory.  0 or -1. */
static int note_in(gck_state *state, PyObject *entry, PyObject *x, const char *data, int64_t nbytes)
{
    const Py_ssize_t n = gck_items(entry);
    gck_op_output *kept = Py_TYPE(entry) == state->OpOutput ? (gck_op_output *)entry : NULL;
    int status = 0;

    if (kept != NULL && data < kept->data + kept->nbytes && kept->data < data + nbytes) {
        PyObject *alias = alias_of(state, x);
        status = alias != NULL ? gck_op_output_note(&state->py, kept, alias) : -1;
        Py_XDECREF(alias);
    }
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        status = note_in(state, gck_item(entry, i), x, data, nbytes);
    }
    return status;
}

int gck_note_unseen(gck_state *state, PyObject *x)
{
    const unsigned long thread = PyThread_get_thread_ident();
    const Py_ssize_t n = gck_items(x);
    const char *data;
    int64_t nbytes;
    int status = 0;

    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        status = gck_note_unseen(state, gck_item(x, i));
    }
    if (n > 0 || gck_memory_of(&state->py, x, &data, &nbytes) < 0) {
        return n > 0 ? status : -1;
    }
    for (const gck_active *a = state->active; nbytes > 0 && a != NULL; a = a->outer) {
        for (Py_ssize_t i = a->thread == thread ? a->store->ncalls : 0; status == 0 && i > 0; i--) {
            PyObject *entry = i <= a->store->ncalls ? Py_NewRef(a->store->calls[i - 1].entry) : Py_NewRef(Py_None);
            status = note_in(state, entry, x, data, nbytes);
            Py_DECREF(entry);
        }
    }
    return status;
}

/* As gck_unwritten() of one output. */
static int unwritten(const gck_py *py, const gck_op_output *kept)
{
    PyObject *others = Py_XNewRef(kept->others);
    Py_ssize_t n = others != NULL ? PyList_Size(others) : 0;
    int64_t now = kept->version, then;
    int same = n > 0 && gck_version_of(py, kept->val, &now) < 0 ? -1 : 1;

    n = now == kept->version ? n : 0;            /* what it shows is reported where the value is returned */
    for (Py_ssize_t i = 0; same > 0 && i < n; i++) {
        PyObject *row = PyList_GetItem(others, i);
        then = PyLong_AsLongLong(PyTuple_GetItem(row, 1));
        same = PyErr_Occurred() || gck_version_of(py, PyTuple_GetItem(row, 0), &now) < 0 ? -1 : now == then;
    }
    Py_XDECREF(others);
    return same;
}

int gck_unwritten(const gck_state *state, PyObject *entry)
{
    const Py_ssize_t n = gck_items(entry);
    int same = Py_TYPE(entry) == state->OpOutput ? unwritten(&state->py, (gck_op_output *)entry) : 1;

    for (Py_ssize_t i = 0; same > 0 && i < n; i++) {
        same = gck_unwritten(state, gck_item(entry, i));
    }
    return same;
}

int gck_settle_outputs(gck_op_storage *store)
{
    int same = 1;

    for (Py_ssize_t i = 0; same >= 0 && i < store->ncalls; i++) {
        PyObject *entry = Py_NewRef(store->calls[i].entry);
        same = gck_unwritten(store->state, entry);
        if (same == 0) {                         /* it runs again */
            gck_op_storage_keep(store, i, Py_NewRef(store->state->py.recompute_mark));
        }
        Py_DECREF(entry);
    }
    return same < 0 ? -1 : 0;
}
