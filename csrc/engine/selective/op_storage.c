/* op_storage.c: heap type OpStorage: the calls of operators that a region keeps. */
#include "engine/selective/op_storage.h"

#include "torch/error.h"

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
static int find_in(const gck_op_policy *names, const gck_call *call)
{
    const int i = names != NULL ? gck_op_policy_find(names, call->op) : -1;

    return i >= 0 && names->named[i].keep == GCK_OP_REPLAY_CAST && !is_rounding_cast(call) ? -1 : i;
}

static int lines_of(const gck_op_policy *names) { return names != NULL ? names->n : 0; }

int gck_op_storage_find(const gck_op_storage *store, const gck_call *call)
{
    if (store->traced || (store->policy != NULL && store->policy->rows == Py_None)) {
        return GCK_LINE_BY_KEY;
    }
    const int i = find_in(store->policy, call), decides = find_in(store->discrete_rules, call);
    const gck_op_rule *named = i >= 0 ? &store->policy->named[i] : NULL;

    /* A discrete output is kept whatever the policy says, unless the policy keeps it anyway.  An
     * exception is a result that backward compares with its input: if it were kept exactly beside
     * an approximately restored input, it would equal none of its values. */
    if (decides >= 0 && (named == NULL || named->keep == GCK_OP_RECOMPUTE || named->every > 1
                         || store->discrete_rules->named[decides].keep == GCK_OP_REPLAY_CHOICE)) {
        return lines_of(store->policy) + decides;
    }
    return i;
}

const gck_op_rule *gck_op_storage_discrete_rule(const gck_op_storage *store, const gck_call *call)
{
    const int i = find_in(store->discrete_rules, call);

    return i >= 0 ? &store->discrete_rules->named[i] : NULL;
}

const gck_op_rule *gck_op_storage_rule(const gck_op_storage *store, int i)
{
    const int n = lines_of(store->policy);

    return i < n ? &store->policy->named[i] : &store->discrete_rules->named[i - n];
}

int gck_op_storage_nlines(const gck_op_storage *store)
{
    return lines_of(store->policy) + lines_of(store->discrete_rules);
}

static int store_traverse(PyObject *op, visitproc visit, void *arg)
{
    gck_op_storage *self = (gck_op_storage *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->storage);
    Py_VISIT((PyObject *)self->policy);
    Py_VISIT((PyObject *)self->discrete_rules);
    Py_VISIT(self->draws);
    Py_VISIT(self->told);
    Py_VISIT(self->candidates);
    for (int i = 0; self->lines != NULL && i < gck_op_storage_nlines(self); i++) {
        Py_VISIT(self->lines[i]);
    }
    return 0;
}

static int store_clear(PyObject *op)
{
    gck_op_storage *self = (gck_op_storage *)op;

    Py_CLEAR(self->storage);
    Py_CLEAR(self->candidates);
    Py_CLEAR(self->draws);
    Py_CLEAR(self->told);
    for (int i = 0; self->lines != NULL && i < gck_op_storage_nlines(self); i++) {
        Py_CLEAR(self->lines[i]);
    }
    return 0;
}

static void store_dealloc(PyObject *op)
{
    gck_op_storage *self = (gck_op_storage *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    store_clear(op);
    Py_XDECREF((PyObject *)self->policy);
    Py_XDECREF((PyObject *)self->discrete_rules);
    free(self->lines);
    free(self->counters);
    PyObject_GC_Del(op);
    Py_DECREF(type);
}

static PyMemberDef store_members[] = {
    {"storage", T_OBJECT, offsetof(gck_op_storage, storage), READONLY, "{operator: {call: what is kept of it}}."},
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

PyType_Spec gck_op_storage_spec = {
    .name = "gradckpt._C.OpStorage",
    .basicsize = sizeof(gck_op_storage),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = store_slots,
};

int gck_is_op_storage(PyObject *x)
{
    return (destructor)PyType_GetSlot(Py_TYPE(x), Py_tp_dealloc) == store_dealloc;
}

gck_op_storage *gck_op_storage_new(gck_state *state, gck_op_policy *policy, int mutation, int reusable)
{
    gck_op_storage *self = (gck_op_storage *)PyType_GenericAlloc(state->OpStorage, 0);

    if (self == NULL) {
        return NULL;
    }
    self->state = state;
    self->mutation = mutation;
    self->reusable = reusable;
    self->policy = (gck_op_policy *)Py_XNewRef((PyObject *)policy);
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

int gck_op_storage_replay_discrete(gck_op_storage *store, int replay_discrete)
{
    gck_state *state = store->state;
    PyObject **names = &state->replay_discrete[replay_discrete > 1];
    PyObject **lines;

    if (*names == NULL) {
        *names = PyObject_CallFunction(state->py.call.discrete_rules, "i", replay_discrete > 1);
    }
    if (*names == NULL || replay_discrete <= store->replay_discrete) {
        return *names == NULL ? -1 : 0;
    }
    const int before = gck_op_storage_nlines(store), now = lines_of(store->policy) + ((gck_op_policy *)*names)->n;
    if ((lines = realloc(store->lines, (size_t)(now + 1) * sizeof *lines)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    /* the names with casts begin with the others */
    memset((void *)(lines + before), 0, (size_t)(now - before) * sizeof *lines);
    store->lines = lines;
    store->replay_discrete = replay_discrete;
    Py_XDECREF((PyObject *)store->discrete_rules);
    store->discrete_rules = (gck_op_policy *)Py_NewRef(*names);
    return 0;
}

PyObject *gck_op_storage_calls(gck_op_storage *store, int line, const gck_call *call, int make)
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
        PyErr_Format(PyExc_TypeError,
                     "gradckpt: the storage of a selective region holds %R, which gradckpt did not write", calls);
        Py_CLEAR(calls);
    }
    return calls;
}

PyObject *gck_make_op_storage(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *names;
    int mutation, reusable;

    if (!PyArg_ParseTuple(args, "O!pp:make_op_storage", state->OpPolicy, &names, &mutation, &reusable)) {
        return NULL;
    }
    return (PyObject *)gck_op_storage_new(state, (gck_op_policy *)names, mutation, reusable);
}
