/* op_storage.c: heap type Store: the calls of operators that a region keeps. */
#include "engine/selective/op_storage.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* 1 for a floating dtype; 0 for none and anything else. */
static int is_floating(PyObject *dtype)
{
    PyObject *floating = dtype != NULL ? PyObject_GetAttrString(dtype, "is_floating_point") : NULL;
    const int truth = floating == Py_True;

    Py_XDECREF(floating);
    gck_error_report();
    return truth;
}

/* 1 when this call of _to_copy makes integers or bools of floating values. */
static int is_rounding_cast(const gck_call *call)
{
    PyObject *to = call->kwargs != NULL ? PyDict_GetItemString(call->kwargs, "dtype") : NULL;
    PyObject *x = to != NULL && to != Py_None && PyTuple_Size(call->args) > 0 ? PyTuple_GetItem(call->args, 0) : NULL;
    PyObject *from = x != NULL ? PyObject_GetAttrString(x, "dtype") : NULL;
    const int truth = is_floating(from) && !is_floating(to);

    Py_XDECREF(from);
    return truth;
}

/* Index among these names, or -1. */
static int find_in(const gck_names *names, const gck_call *call)
{
    const int i = names != NULL ? gck_names_find(names, call->op) : -1;

    return i >= 0 && names->named[i].keep == GCK_DECIDE_CAST && !is_rounding_cast(call) ? -1 : i;
}

static int lines_of(const gck_names *names) { return names != NULL ? names->n : 0; }

int gck_store_find(const gck_store *store, const gck_call *call)
{
    if (store->traced || (store->policy != NULL && store->policy->rows == Py_None)) {
        return GCK_ASKED;
    }
    const int i = find_in(store->policy, call), decides = find_in(store->deciding, call);
    const gck_named *named = i >= 0 ? &store->policy->named[i] : NULL;

    /* A discrete output is kept whatever the policy says, unless the policy keeps it anyway.  An
     * exception is a result that backward compares with its input: if it were kept exactly beside
     * an approximately restored input, it would equal none of its values. */
    if (decides >= 0 && (named == NULL || named->keep == GCK_RECOMPUTE || named->every > 1
                         || store->deciding->named[decides].keep == GCK_CHOOSE)) {
        return lines_of(store->policy) + decides;
    }
    return i;
}

const gck_named *gck_store_deciding(const gck_store *store, const gck_call *call)
{
    const int i = find_in(store->deciding, call);

    return i >= 0 ? &store->deciding->named[i] : NULL;
}

const gck_named *gck_store_named(const gck_store *store, int i)
{
    const int n = lines_of(store->policy);

    return i < n ? &store->policy->named[i] : &store->deciding->named[i - n];
}

int gck_store_nlines(const gck_store *store) { return lines_of(store->policy) + lines_of(store->deciding); }

static int store_traverse(PyObject *op, visitproc visit, void *arg)
{
    gck_store *self = (gck_store *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->storage);
    Py_VISIT((PyObject *)self->policy);
    Py_VISIT((PyObject *)self->deciding);
    Py_VISIT(self->draws);
    Py_VISIT(self->told);
    Py_VISIT(self->candidates);
    for (int i = 0; self->lines != NULL && i < gck_store_nlines(self); i++) {
        Py_VISIT(self->lines[i]);
    }
    return 0;
}

static int store_clear(PyObject *op)
{
    gck_store *self = (gck_store *)op;

    Py_CLEAR(self->storage);
    Py_CLEAR(self->candidates);
    Py_CLEAR(self->draws);
    Py_CLEAR(self->told);
    for (int i = 0; self->lines != NULL && i < gck_store_nlines(self); i++) {
        Py_CLEAR(self->lines[i]);
    }
    return 0;
}

static void store_dealloc(PyObject *op)
{
    gck_store *self = (gck_store *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    store_clear(op);
    Py_XDECREF((PyObject *)self->policy);
    Py_XDECREF((PyObject *)self->deciding);
    free(self->lines);
    free(self->counters);
    PyObject_GC_Del(op);
    Py_DECREF(type);
}

static PyMemberDef store_members[] = {
    {"storage", T_OBJECT, offsetof(gck_store, storage), READONLY, "{operator: {call: what is kept of it}}."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot store_slots[] = {
    {Py_tp_dealloc, store_dealloc},
    {Py_tp_traverse, store_traverse},
    {Py_tp_clear, store_clear},
    {Py_tp_members, store_members},
    {Py_tp_doc, "The outputs that one selective region keeps."},
    {0, NULL},
};

PyType_Spec gck_store_spec = {
    .name = "gradckpt._C.Store",
    .basicsize = sizeof(gck_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = store_slots,
};

int gck_is_store(PyObject *x)
{
    return (destructor)PyType_GetSlot(Py_TYPE(x), Py_tp_dealloc) == store_dealloc;
}

gck_store *gck_store_new(gck_state *state, gck_names *policy, int mutation, int reusable)
{
    gck_store *self = (gck_store *)PyType_GenericAlloc(state->Store, 0);

    if (self == NULL) {
        return NULL;
    }
    self->state = state;
    self->mutation = mutation;
    self->reusable = reusable;
    self->policy = (gck_names *)Py_XNewRef((PyObject *)policy);
    self->storage = PyObject_CallFunctionObjArgs(state->py.defaultdict, (PyObject *)&PyDict_Type, NULL);
    self->lines = calloc((size_t)lines_of(policy) + 1, sizeof *self->lines);
    self->counters = calloc(policy != NULL ? (size_t)policy->ngroups + 1 : 1, sizeof *self->counters);
    if (self->lines == NULL || self->counters == NULL || self->storage == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_NoMemory();
        }
        Py_CLEAR(self);
    }
    return self;
}

int gck_store_decide_from(gck_store *store, int decisions)
{
    gck_state *state = store->state;
    PyObject **names = &state->decisions[decisions > 1];
    PyObject **lines;

    if (*names == NULL) {
        *names = PyObject_CallFunction(state->py.call.decision_names, "i", decisions > 1);
    }
    if (*names == NULL || decisions <= store->decisions) {
        return *names == NULL ? -1 : 0;
    }
    const int before = gck_store_nlines(store), now = lines_of(store->policy) + ((gck_names *)*names)->n;
    if ((lines = realloc(store->lines, (size_t)(now + 1) * sizeof *lines)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    /* the names with casts begin with the others */
    memset((void *)(lines + before), 0, (size_t)(now - before) * sizeof *lines);
    store->lines = lines;
    store->decisions = decisions;
    Py_XDECREF((PyObject *)store->deciding);
    store->deciding = (gck_names *)Py_NewRef(*names);
    return 0;
}

PyObject *gck_store_calls(gck_store *store, int line, const gck_call *call, int make)
{
    PyObject *calls = Py_XNewRef(line >= 0 ? store->lines[line] : PyDict_GetItemWithError(store->storage, call->key));

    if (calls == NULL && make && !PyErr_Occurred()) {
        calls = PyDict_New();
        if (calls != NULL && PyDict_SetItem(store->storage, call->key, calls) < 0) {
            Py_CLEAR(calls);
        }
        if (line >= 0) {
            store->lines[line] = Py_XNewRef(calls);
        }
    }
    if (calls != NULL && !PyDict_Check(calls)) {
        PyErr_Format(PyExc_TypeError, "gradckpt: the storage of a selective region holds %R, which gradckpt did not write", calls);
        Py_CLEAR(calls);
    }
    return calls;
}

PyObject *gck_make_store(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *names;
    int mutation, reusable;

    if (!PyArg_ParseTuple(args, "O!pp:make_store", state->Names, &names, &mutation, &reusable)) {
        return NULL;
    }
    return (PyObject *)gck_store_new(state, (gck_names *)names, mutation, reusable);
}
