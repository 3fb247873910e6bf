/* op_policy.c: heap type OpPolicy: operators, and what happens to their outputs. */
#include "engine/selective/op_policy.h"

#include "torch/calls.h"
#include "torch/generators.h"
#include "engine/checkpoint_options.h"

#include <stdlib.h>
#include <string.h>

static const gck_owned names_owned[] = {offsetof(gck_op_policy, rows), offsetof(gck_op_policy, wanted), 0};

static int names_traverse(PyObject *op, visitproc visit, void *arg)
{
    return gck_object_visit(op, names_owned, visit, arg);
}

static void names_dealloc(PyObject *op)
{
    gck_op_policy *self = (gck_op_policy *)op;

    PyObject_GC_UnTrack(op);
    gck_owned_clear(op, names_owned);
    free(self->named);
    free(self->slots);
    gck_object_free(op);
}

static PyType_Slot names_slots[] = {
    {Py_tp_dealloc, names_dealloc},
    {Py_tp_traverse, names_traverse},
    {Py_tp_doc, "Operators, and what happens to their outputs."},
    {0, NULL},
};

PyType_Spec gck_op_policy_spec = {
    .name = "gradckpt._C.OpPolicy",
    .basicsize = sizeof(gck_op_policy),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = names_slots,
};

static int read_row(gck_state *state, PyObject *row, gck_op_rule *named)
{
    PyObject *op, *compress, *form;
    int keep, mixing;

    if (!PyArg_ParseTuple(row, "OiOiiiOi", &op, &keep, &compress, &named->every, &named->phase, &named->group, &form,
                          &mixing)
        || gck_options_kept(state, compress, &named->plan) < 0) {
        return -1;
    }
    named->op = op;
    named->form = form != Py_None ? form : NULL;
    named->keep = (gck_op_action)keep;
    named->mixing = (gck_op_mixing)mixing;
    named->draws = gck_op_draws(&state->py, op);
    return named->draws < 0 ? -1 : 0;
}

/* The slot in which the operator is, or would be. */
static size_t slot_of(const gck_op_policy *names, const PyObject *op)
{
    size_t at = ((uintptr_t)op >> 4) * 0x9E3779B97F4A7C15u >> 32 & names->mask;

    while (names->slots[at] >= 0 && names->named[names->slots[at]].op != op) {
        at = (at + 1) & names->mask;
    }
    return at;
}

int gck_op_policy_find(const gck_op_policy *names, const PyObject *op) { return names->slots[slot_of(names, op)]; }

/* The first of several rows with the same operator counts.  0 or -1. */
static int index_names(gck_op_policy *self)
{
    self->mask = 15;
    while (self->mask < 2 * (size_t)self->n) {
        self->mask = 2 * self->mask + 1;
    }
    if ((self->slots = malloc((self->mask + 1) * sizeof *self->slots)) == NULL) {
        return gck_done(PyErr_NoMemory());
    }
    memset(self->slots, -1, (self->mask + 1) * sizeof *self->slots);
    for (int i = 0; i < self->n; i++) {
        const size_t at = slot_of(self, self->named[i].op);
        if (self->slots[at] < 0) {
            self->slots[at] = i;
        }
    }
    return 0;
}

PyObject *gck_make_op_policy(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *rows, *wanted;
    gck_op_policy *self;
    int status = 0;

    if (!PyArg_ParseTuple(args, "OO!:make_op_policy", &rows, &PyFrozenSet_Type, &wanted)
        || (rows != Py_None && !PyTuple_Check(rows))
        || (self = (gck_op_policy *)PyType_GenericAlloc(state->OpPolicy, 0)) == NULL) {
        return PyErr_Occurred() ? NULL
             : PyErr_Format(PyExc_TypeError, "gradckpt: make_op_policy takes a tuple of rows or None, not %R", rows);
    }
    const Py_ssize_t n = rows == Py_None ? 0 : PyTuple_Size(rows);
    self->wanted = Py_NewRef(wanted);
    self->rows = Py_NewRef(rows);
    if ((self->named = calloc((size_t)n + 1, sizeof *self->named)) == NULL) {
        PyErr_NoMemory();
        status = -1;
    }
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        gck_op_rule *named = &self->named[self->n++];
        status = read_row(state, PyTuple_GetItem(rows, i), named);
        self->ngroups = named->group >= self->ngroups ? named->group + 1 : self->ngroups;
        self->replay_discrete = named->plan.replay_discrete > self->replay_discrete ? named->plan.replay_discrete
                                                                                    : self->replay_discrete;
        self->lossy |= gck_plan_is_lossy(&named->plan);
    }
    if (status < 0 || index_names(self) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}
