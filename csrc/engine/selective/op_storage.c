/* op_storage.c: heap type OpStorage: the calls of operators that a region keeps. */
#include "engine/selective/op_storage.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "engine/payload/stats.h"

#include <stdlib.h>
#include <string.h>

/* 1 for a floating dtype; 0 for none and anything else. */
static int is_floating(PyObject *dtype)
{
    GCK_SCOPED PyObject *floating = dtype != NULL ? PyObject_GetAttrString(dtype, "is_floating_point") : NULL;

    gck_error_report();
    return floating == Py_True;
}

/* 1 when this call of _to_copy makes integers or bools of floating values. */
static int is_rounding_cast(const gck_call *call)
{
    PyObject *to = call->kwargs != NULL ? PyDict_GetItemString(call->kwargs, "dtype") : NULL;
    PyObject *x = to != NULL && to != Py_None && PyTuple_Size(call->args) > 0 ? PyTuple_GetItem(call->args, 0) : NULL;
    GCK_SCOPED PyObject *from = x != NULL ? PyObject_GetAttrString(x, "dtype") : NULL;
    return is_floating(from) && !is_floating(to);
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

#define OF(field) offsetof(gck_op_storage, field)
static const gck_owned store_owned[] = {
    OF(storage), OF(candidates), OF(watched.op), OF(policy), OF(discrete_rules), 0,
};
#undef OF

static int store_traverse(PyObject *op, visitproc visit, void *arg)
{
    gck_op_storage *self = (gck_op_storage *)op;

    for (Py_ssize_t i = 0; i < self->ncalls; i++) {
        Py_VISIT(self->calls[i].key);
        Py_VISIT(self->calls[i].entry);
        Py_VISIT(self->calls[i].drawn);
    }
    return gck_object_visit(op, store_owned, visit, arg);
}

static int store_clear(PyObject *op)
{
    gck_op_storage *self = (gck_op_storage *)op;

    while (self->ncalls > 0) {
        const gck_recorded_call last = self->calls[--self->ncalls];     /* freeing it may run Python */
        Py_XDECREF(last.key);
        Py_XDECREF(last.entry);
        Py_XDECREF(last.drawn);
    }
    gck_uncount_random(self->state, self->random_bytes);
    self->random_bytes = 0;
    return gck_owned_clear(op, store_owned);
}

static void store_dealloc(PyObject *op)
{
    gck_op_storage *self = (gck_op_storage *)op;

    PyObject_GC_UnTrack(op);
    store_clear(op);
    free(self->calls);
    free(self->counters);
    gck_object_free(op);
}

PyObject *gck_op_storage_picture(gck_op_storage *store)
{
    if (store->ncalls > 0) {
        PyDict_Clear(store->storage);
    }
    for (Py_ssize_t i = 0; i < store->ncalls; i++) {     /* a key's hash may be Python */
        GCK_SCOPED PyObject *key = Py_NewRef(store->calls[i].key), *entry = Py_NewRef(store->calls[i].entry);
        GCK_SCOPED PyObject *calls = PyObject_GetItem(store->storage, key);
        GCK_SCOPED PyObject *number = calls != NULL ? PyLong_FromSsize_t(PyDict_Size(calls)) : NULL;
        if (number == NULL || PyDict_SetItem(calls, number, entry) < 0) {
            return NULL;
        }
    }
    return Py_NewRef(store->storage);
}

static PyObject *store_storage(PyObject *op, void *Py_UNUSED(unused))
{
    return gck_op_storage_picture((gck_op_storage *)op);
}

static PyGetSetDef store_getset[] = {
    {"storage", store_storage, NULL, "{operator: {number: what is kept of its call}}.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot store_slots[] = {
    {Py_tp_dealloc, store_dealloc},
    {Py_tp_traverse, store_traverse},
    {Py_tp_clear, store_clear},
    {Py_tp_getset, store_getset},
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
    self->approximate_outputs = policy != NULL && policy->lossy;
    self->storage = PyObject_CallFunctionObjArgs(state->py.defaultdict, (PyObject *)&PyDict_Type, NULL);
    self->counters = calloc(policy != NULL ? (size_t)policy->ngroups + 1 : 1, sizeof *self->counters);
    if (self->counters == NULL || self->storage == NULL) {
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

    if (*names == NULL) {
        *names = PyObject_CallFunction(state->py.call.discrete_rules, "i", replay_discrete > 1);
    }
    if (*names == NULL || replay_discrete <= store->replay_discrete) {
        return *names == NULL ? -1 : 0;
    }
    store->replay_discrete = replay_discrete;
    Py_XDECREF((PyObject *)store->discrete_rules);
    store->discrete_rules = (gck_op_policy *)Py_NewRef(*names);
    return 0;
}

Py_ssize_t gck_op_storage_add(gck_op_storage *store, const gck_call *call)
{
    if (gck_make_room(&store->calls, store->ncalls, &store->room, sizeof *store->calls) < 0) {
        return -1;
    }
    store->calls[store->ncalls] = (gck_recorded_call){
        .kind = call->kind,
        .stamp = call->stamp,
        .key = Py_NewRef(call->key),
        .entry = Py_NewRef(store->state->py.recompute_mark),
    };
    return store->ncalls++;
}

int gck_op_storage_keep(gck_op_storage *store, Py_ssize_t index, PyObject *entry)
{
    GCK_SCOPED PyObject *old = entry;

    if (entry != NULL && index < store->ncalls) {
        old = store->calls[index].entry;
        store->calls[index].entry = entry;
    }
    if (PyDict_Size(store->storage) > 0 && !store->traced) {
        PyDict_Clear(store->storage);            /* a picture keeps nothing alive that is gone */
    }
    return entry == NULL ? -1 : 0;
}

PyObject *gck_make_op_storage(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *names;
    int mutation, reusable, approximate;

    if (!PyArg_ParseTuple(args, "O!ppp:make_op_storage", state->OpPolicy, &names, &mutation, &reusable, &approximate)) {
        return NULL;
    }
    gck_op_storage *store = gck_op_storage_new(state, (gck_op_policy *)names, mutation, reusable);

    if (store != NULL) {
        store->approximate_inputs |= approximate;
    }
    return (PyObject *)store;
}
