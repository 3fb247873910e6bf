/* saved_hooks.c: heap type SavedHooks: the pair of hooks that decides how a saved tensor is kept.
 *
 * Nothing is recomputed: pack encodes, unpack decodes.  What has to stay exact is kept as autograd
 * keeps it, detached, so that the graph does not hold itself. */
#include "engine/saved/saved_hooks.h"

#include "gradckpt.h"
#include "torch/error.h"
#include "torch/input.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/state.h"
#include "engine/checkpoint_options.h"
#include "engine/payload/eligible.h"
#include "engine/payload/packed.h"
#include "engine/saved/saved_form.h"
#include "engine/saved/saved_tensor.h"
#include "engine/saved/saved_waiting.h"

/* ---- pack ---- */

/* The reason why x stays uncompressed, GCK_COMPRESS, or -1.  *form: new reference to the answer of
 * gradckpt._engine.saved_roles, NULL where that was not called.  number: of the node that is being
 * made. */
static int judge(const gck_saved_hooks *self, gck_input *in, PyObject *node, int64_t number, PyObject **form)
{
    gck_py *py = &self->packing.state->py;
    const gck_plan *plan = &self->packing.plan;
    PyObject *of;
    int reason, tracing;

    if (gck_input_read(py, in, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0) {
        return -1;
    }
    if ((PyObject *)Py_TYPE(in->x) == py->Parameter
        || gck_eligible(plan, in->requires_grad, in->leaf, 0) == GCK_SKIP_LEAF) {
        return GCK_SKIP_LEAF;
    }
    reason = gck_input_judge(py, in, in->requires_grad ? plan->codec : gck_codec_find("mask"), plan->min_numel);
    if (reason == GCK_COMPRESS && (tracing = gck_tracing(py)) != 0) {
        return tracing < 0 ? -1 : GCK_SKIP_TRACING;
    }
    if (!in->requires_grad) {
        *form = reason == GCK_COMPRESS ? Py_BuildValue("(sO)", "mask", Py_None) : NULL;
        if (PyErr_Occurred()) {
            return -1;
        }
        return reason == GCK_SKIP_DTYPE || reason == GCK_SKIP_FLOAT64 ? GCK_SKIP_NO_GRAD : reason;
    }
    if (reason != GCK_COMPRESS && reason != GCK_SKIP_SMALL) {
        return reason;
    }
    of = PyLong_FromLongLong(self->waiting == NULL || gck_packing_for_region ? -1 : number);
    *form = of != NULL ? PyObject_CallFunctionObjArgs(py->call.form_when_packed, in->x, node, of, NULL) : NULL;
    Py_XDECREF(of);
    if (*form == NULL) {
        reason = -1;
    } else if (*form == Py_True) {
        reason = GCK_SKIP_LEAF;
    } else if (reason == GCK_COMPRESS) {
        reason = GCK_SKIP_EXACT;
    }
    if (reason != GCK_SKIP_EXACT) {
        Py_CLEAR(*form);
    }
    return reason;
}

/* Let the tensor wait in `to`.  0 or -1. */
static int wait(gck_saved_hooks *self, gck_input *in, int64_t number, gck_saved_tensor *to)
{
    gck_state *state = self->packing.state;
    gck_packing packing = self->packing;
    const int64_t kept = state->stats.uncompressed_bytes;

    packing.outer = 0;                           /* outer hooks see its final form */
    if (gck_pack_exactly(&packing, in, &to->form.entry) < 0
        || gck_count_uncompressed(state, in->x, GCK_SKIP_UNKNOWN) < 0) {
        return -1;
    }
    to->number = number;
    to->waits = state->stats.uncompressed_bytes - kept;
    to->epoch = state->epoch;
    to->hooks = Py_NewRef((PyObject *)self);
    gck_count_live(state, to->waits);
    return gck_saved_waiting_add(self->waiting, to);
}

/* Keep the tensor in the form that is now known.  0 or -1. */
static int put(const gck_saved_hooks *self, PyObject *form, gck_input *in, gck_saved_tensor *to, int reason)
{
    if (gck_saved_form_put(self, form, in, &to->form, reason) < 0) {
        return -1;
    }
    return to->form.storage == NULL ? 0 : gck_saved_waiting_add(self->waiting, to) < 0 ? -1
         : gck_saved_form_hold(self, &to->form);
}

/* Called by autograd for every tensor it saves, without grad.  New reference: a SavedTensor. */
static PyObject *pack(PyObject *op, PyObject *x)
{
    gck_saved_hooks *self = (gck_saved_hooks *)op;
    gck_state *state = self->packing.state;
    /* First, because asking for the node of a view that was changed in place makes nodes. */
    const int64_t last = self->waiting != NULL ? gck_last_node_number(&state->py) : 0;
    const int64_t number = last >= 0 && self->packing.outer && last == self->last ? self->number : last;
    PyObject *node = number < 0 ? NULL : PyObject_GetAttr(x, state->py.names.grad_fn), *form = NULL;
    gck_saved_tensor *to = node != NULL ? gck_saved_tensor_new(state) : NULL;
    gck_input in = gck_input_of(x);
    int status = to == NULL ? -1 : 0, reason;

    if (status == 0 && self->waiting != NULL && node != Py_None) {
        status = gck_saved_waiting_reach(self->waiting, state, node, number);
    }
    reason = status < 0 ? -1 : judge(self, &in, node, number, &form);
    if (reason < 0 || (form == Py_False ? wait(self, &in, number, to) : put(self, form, &in, to, reason)) < 0) {
        Py_CLEAR(to);
    }
    if (to != NULL && self->packing.outer && self->waiting != NULL) {
        self->number = number;
        self->last = gck_last_node_number(&state->py);
        if (self->last < 0) {
            Py_CLEAR(to);
        }
    }
    Py_XDECREF(node);
    Py_XDECREF(form);
    gck_input_clear(&in);
    return (PyObject *)to;
}

/* Return the tensor to autograd without history, which autograd holds itself. */
static PyObject *unpack(PyObject *op, PyObject *packed)
{
    gck_state *state = ((gck_saved_hooks *)op)->packing.state;

    if (Py_TYPE(packed) != state->SavedTensor) {
        return PyErr_Format(PyExc_TypeError, "gradckpt: not a saved tensor of compress_saved(): %R", Py_TYPE(packed));
    }
    return gck_saved_tensor_restore((gck_saved_tensor *)packed);
}

static PyMethodDef pack_def = {"pack", pack, METH_O, NULL};
static PyMethodDef unpack_def = {"unpack", unpack, METH_O, NULL};

/* ---- SavedHooks ---- */

static int hooks_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((gck_saved_hooks *)op)->outer_pack);
    Py_VISIT(((gck_saved_hooks *)op)->outer_unpack);
    Py_VISIT(((gck_saved_hooks *)op)->waiting);
    return 0;
}

static int hooks_clear(PyObject *op)
{
    Py_CLEAR(((gck_saved_hooks *)op)->outer_pack);
    Py_CLEAR(((gck_saved_hooks *)op)->outer_unpack);
    Py_CLEAR(((gck_saved_hooks *)op)->waiting);
    return 0;
}

static void hooks_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    hooks_clear(op);
    gck_object_free(op);
}

static PyType_Slot hooks_slots[] = {
    {Py_tp_dealloc, hooks_dealloc},
    {Py_tp_traverse, hooks_traverse},
    {Py_tp_clear, hooks_clear},
    {0, NULL},
};

PyType_Spec gck_saved_hooks_spec = {
    .name = "gradckpt._C.SavedHooks",
    .basicsize = sizeof(gck_saved_hooks),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = hooks_slots,
};

static int is_ours(PyObject *hook) { return PyCFunction_CheckExact(hook) && PyCFunction_GetFunction(hook) == pack; }

/* Find the hooks around ours, which see the bytes of our payloads.  Around other hooks of this file
 * they are the hooks of those: the innermost codec counts.  0 or -1. */
static int find_outer(gck_saved_hooks *self, const gck_py *py)
{
    PyObject *top = PyObject_CallFunctionObjArgs(py->top_hooks, Py_True, NULL);
    PyObject *outer_pack = NULL, *outer_unpack = NULL;

    if (top == NULL || (top != Py_None && !PyArg_ParseTuple(top, "OO", &outer_pack, &outer_unpack))) {
        Py_XDECREF(top);
        return -1;
    }
    if (outer_pack != NULL && is_ours(outer_pack)) {
        const gck_saved_hooks *around = (gck_saved_hooks *)PyCFunction_GetSelf(outer_pack);
        outer_pack = around->outer_pack;
        outer_unpack = around->outer_unpack;
    }
    self->outer_pack = Py_XNewRef(outer_pack);
    self->outer_unpack = Py_XNewRef(outer_unpack);
    self->packing.outer = outer_pack != NULL;
    Py_DECREF(top);
    return 0;
}

/* New reference; NULL: nothing was pushed.  Tensors that wait under other hooks wait in a list of
 * their own: a region's recompute must keep what its forward kept, whatever else the thread
 * does. */
static gck_saved_hooks *push(gck_state *state, PyObject *compress)
{
    gck_plan plan;
    gck_saved_hooks *self;

    if (gck_options_plan(state, compress, &plan) < 0) {
        return NULL;
    }
    self = (gck_saved_hooks *)PyType_GenericAlloc(state->SavedHooks, 0);
    if (self == NULL) {
        return NULL;
    }
    self->packing = (gck_packing){.state = state, .plan = plan};
    if (find_outer(self, &state->py) < 0
        || (plan.codec->max_error > 0
            && (self->waiting = self->packing.outer ? gck_saved_list_new() : gck_saved_list_of_thread()) == NULL)
        || gck_hooks_push(&state->py, &pack_def, &unpack_def, (PyObject *)self) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

int gck_saved_hooks_replay_discrete(PyObject *hooks)
{
    PyObject *hook = PyTuple_Check(hooks) ? PyTuple_GetItem(hooks, 0) : NULL;

    return hook != NULL && is_ours(hook)
        ? ((gck_saved_hooks *)PyCFunction_GetSelf(hook))->packing.plan.replay_discrete : 0;
}

PyObject *gck_saved_hooks_push(PyObject *module, PyObject *compress)
{
    gck_saved_hooks *self = push(gck_state_of(module), compress);

    Py_XDECREF((PyObject *)self);
    return self == NULL ? NULL : Py_NewRef(Py_None);
}

/* Take our hooks, the innermost, off.  Outer hooks now see what still waits, unless the block
 * failed: a recompute has stopped then and takes none.  Without outer hooks it continues to wait
 * for another block of this thread.  0 or -1. */
static int pop(gck_state *state, int failed)
{
    PyObject *top = PyObject_CallFunctionObjArgs(state->py.top_hooks, Py_True, NULL);
    PyObject *hook = top != NULL && top != Py_None ? PyTuple_GetItem(top, 0) : NULL;
    PyObject *op = hook != NULL && is_ours(hook) ? Py_NewRef(PyCFunction_GetSelf(hook)) : NULL;
    gck_saved_hooks *self = (gck_saved_hooks *)op;
    gck_saved_tensor *saved;
    int status = top == NULL ? -1 : 0;

    Py_XDECREF(top);
    gck_hooks_pop(&state->py);
    if (op != NULL && self->waiting != NULL) {
        self->packing.outer = self->packing.outer && !failed;
        for (int i = 2 * GCK_WAITING_TENSORS; status == 0 && i-- > 0;) {
            /* downwards: settling may shorten the list */
            saved = gck_saved_list_known(self->waiting, i);
            if (saved != NULL && saved->hooks == op) {
                status = gck_saved_waiting_settle(saved, NULL, !self->packing.outer);
            }
        }
    }
    Py_XDECREF(op);
    return status;
}

PyObject *gck_saved_hooks_pop(PyObject *module, PyObject *failed)
{
    return pop(gck_state_of(module), failed == Py_True) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Search the nodes behind the function's result.  0 or -1. */
static int look_behind(const gck_saved_hooks *self, PyObject *result)
{
    gck_state *state = self->packing.state;
    PyObject *nodes = PyObject_CallFunction(state->py.call.nodes_behind, "(O)", result);
    int status = nodes == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(nodes); i++) {
        status = gck_saved_waiting_reach(self->waiting, state, PyList_GetItem(nodes, i), INT64_MAX);
    }
    Py_XDECREF(nodes);
    return status;
}

PyObject *gck_saved_hooks_call(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *compress, *function, *tuple, *kwargs, *result;
    gck_saved_hooks *self;
    gck_error error;

    if (!PyArg_ParseTuple(args, "OOO!O!:saved_call", &compress, &function, &PyTuple_Type, &tuple, &PyDict_Type, &kwargs)
        || (self = push(state, compress)) == NULL) {
        return NULL;
    }
    result = PyObject_Call(function, tuple, kwargs);
    if (result != NULL && self->waiting != NULL && look_behind(self, result) < 0) {
        Py_CLEAR(result);
    }
    error = gck_error_take();
    pop(state, result == NULL);
    if (gck_error_return(&error) < 0) {
        Py_CLEAR(result);
    }
    Py_DECREF((PyObject *)self);
    return result;
}
