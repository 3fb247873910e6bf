/* saved_hooks.c: heap type SavedHooks: the pair of hooks that decides how a saved tensor is kept.
 *
 * Nothing is recomputed: pack encodes, unpack decodes.  What has to stay exact is kept as autograd
 * keeps it, detached, so that the graph does not hold itself. */
#include "engine/saved/saved_hooks.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "torch/input.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/state.h"
#include "engine/checkpoint_options.h"
#include "engine/innermost_hooks.h"
#include "engine/payload/packed.h"
#include "engine/saved/saved_form.h"
#include "engine/saved/saved_formats.h"
#include "engine/saved/saved_functions.h"
#include "engine/saved/saved_node.h"
#include "engine/saved/saved_pins.h"
#include "engine/saved/saved_reason.h"
#include "engine/saved/saved_search.h"
#include "engine/saved/saved_tensor.h"
#include "engine/saved/saved_waiting.h"

enum { MAX_THREADS = 64 };         /* of a pair: hooks of threads that are remembered      */

/* ---- pack ---- */

/* Let the tensor wait in `to`; late: without a search.  0 or -1. */
static int wait(gck_saved_hooks *self, gck_input *in, int64_t number, int late, gck_saved_tensor *to)
{
    gck_state *state = self->packing.state;
    gck_packing packing = self->packing;

    packing.outer = 0;                           /* outer hooks see its final form */
    if (gck_pack_exactly(&packing, in, &to->form.entry) < 0) {
        return -1;
    }
    to->number = number;
    to->late = late;
    gck_saved_waiting_at(to, &in->view);         /* it was judged, so it has a view */
    to->waits = in->view.numel * (int64_t)gck_itemsize(in->view.dtype);
    gck_count_uncompressed_bytes(state, to->waits, GCK_SKIP_UNKNOWN, 1);
    to->epoch = state->epoch;
    to->hooks = Py_NewRef((PyObject *)self);
    gck_count_live(state, to->waits);
    return gck_saved_waiting_add(self->waiting, to);
}

/* Keep the tensor in the form that is now known.  0 or -1. */
static int store(const gck_saved_hooks *self, const gck_saved_as *as, gck_input *in, gck_saved_tensor *to, int reason)
{
    if (gck_saved_form_store(self, as, in, &to->form, reason, NULL) < 0) {
        return -1;
    }
    to->epoch = self->packing.state->epoch;
    return to->form.storage == NULL ? 0 : gck_saved_waiting_add(self->waiting, to) < 0 ? -1
         : gck_saved_form_hold(self, &to->form);
}

/* Keep the tensor as it is, until its node turns out to be that of a Function.  0 or -1. */
static int store_for_function(gck_saved_hooks *self, gck_input *in, int64_t number, gck_saved_when when,
                            gck_saved_tensor *to, int reason)
{
    const gck_saved_as exact = {.codec = NULL};

    to->result = when == GCK_IF_FUNCTION_OF_RESULT;
    in->leaf = in->leaf && !to->result;          /* a view of a result leads to the node, which must not hold itself */
    if (gck_saved_form_store(self, &exact, in, &to->form, reason, NULL) < 0) {
        return -1;
    }
    gck_saved_waiting_at(to, &in->view);         /* it was judged, so it has a view */
    to->form.storage = NULL;                     /* what else needs it is not known yet */
    to->epoch = self->packing.state->epoch;
    to->reason = reason;
    to->packer = Py_NewRef((PyObject *)self);
    gck_saved_list_of(self->waiting)->undecided = number;
    return 0;
}

/* Keep the tensor, or let it wait.  0 or -1. */
static int keep(gck_saved_hooks *self, gck_input *in, PyObject *node, int64_t number, gck_saved_tensor *to)
{
    GCK_CLEARED_BY(gck_saved_as_clear) gck_saved_as as = {.codec = NULL};
    const gck_py *py = &self->packing.state->py;
    const int64_t made = self->waiting != NULL && node != Py_None ? gck_node_number(py, node) : -1;
    const int late = made >= 0 && gck_saved_waiting_may_last(self->waiting);
    const int result = made >= 0 && made == number;
    /* a node of a Function does not tell all before it has saved everything */
    const int complete = !result || !gck_is_function(node);
    gck_saved_when when = GCK_DECIDED;
    int tracing = -1, status = made < 0 && PyErr_Occurred() ? -1 : 0, reason;

    status = made >= 0 && !late && complete ? gck_saved_search(self, node, made, number, &tracing) : status;
    reason = status < 0 ? -1 : gck_saved_reason(self, in, node, made, number, tracing, &as, &when);
    if (reason == GCK_SKIP_EXACT && as.again != NULL) {
        gck_saved_form_make_again(&to->form, as.again);
    } else {
        status = reason < 0 ? -1 : when == GCK_WAITS ? wait(self, in, number, late, to)
               : when != GCK_DECIDED ? store_for_function(self, in, number, when, to, reason)
               : store(self, &as, in, to, reason);
    }
    return status;
}

/* Called by autograd for every tensor it saves, without grad.  New reference: a SavedTensor. */
static PyObject *pack(PyObject *op, PyObject *x)
{
    gck_saved_hooks *self = (gck_saved_hooks *)op;
    gck_state *state = self->packing.state;
    /* First, because asking for the node of a view that was changed in place makes nodes. */
    const int64_t last = self->waiting != NULL ? gck_last_node_number(&state->py) : 0;
    const int64_t number = last >= 0 && self->packing.outer && last == self->last ? self->number : last;
    GCK_CLEARED_BY(gck_input_clear) gck_input in = gck_input_of(x);
    gck_saved_tensor *to = number < 0 ? NULL : gck_saved_tensor_new(state);
    GCK_SCOPED PyObject *node = to != NULL ? gck_node_of(state, &in) : NULL;

    if (node == NULL || keep(self, &in, node, number, to) < 0
        || (node != Py_None && gck_pins_looked(state, node) < 0)) {
        Py_CLEAR(to);
    }
    if (to != NULL && self->packing.outer && self->waiting != NULL) {
        self->number = number;
        if ((self->last = gck_last_node_number(&state->py)) < 0) {
            Py_CLEAR(to);
        }
    }
    return (PyObject *)to;
}

/* Return the tensor to autograd without history, which autograd holds itself. */
static PyObject *unpack(PyObject *op, PyObject *packed)
{
    gck_saved_hooks *self = (gck_saved_hooks *)op;

    if (Py_TYPE(packed) != self->packing.state->SavedTensor) {
        return PyErr_Format(PyExc_TypeError, "gradckpt: not a saved tensor of compress_saved(): %R", Py_TYPE(packed));
    }
    return gck_saved_search_in_backward(self, (gck_saved_tensor *)packed) < 0 ? NULL
         : gck_saved_tensor_restore((gck_saved_tensor *)packed);
}

static PyMethodDef pack_def = {"pack", pack, METH_O, NULL};
static PyMethodDef unpack_def = {"unpack", unpack, METH_O, NULL};

/* Borrowed: the hooks of this thread, for a pair that any thread may use. */
static gck_saved_hooks *of_thread(gck_saved_hooks *pair)
{
    GCK_SCOPED PyObject *id = PyLong_FromUnsignedLongLong(PyThreadState_GetID(PyThreadState_Get()));
    PyObject *found = id != NULL ? PyDict_GetItemWithError(pair->by_thread, id) : NULL;

    if (found != NULL || PyErr_Occurred()) {
        return (gck_saved_hooks *)found;
    }
    GCK_SCOPED gck_saved_hooks *made = (gck_saved_hooks *)PyType_GenericAlloc(pair->packing.state->SavedHooks, 0);
    if (made == NULL) {
        return NULL;
    }
    made->packing = pair->packing;
    made->formats = pair->formats;
    Py_XINCREF(made->formats.rules);
    Py_XINCREF(made->packing.plan.place);
    if (pair->waits && (made->waiting = gck_saved_list_of_thread()) == NULL) {
        return NULL;
    }
    /* What waits owns its hooks, so those of threads that ended may go. */
    if (PyDict_Size(pair->by_thread) >= MAX_THREADS) {
        PyDict_Clear(pair->by_thread);
    }
    return PyDict_SetItem(pair->by_thread, id, (PyObject *)made) == 0 ? made : NULL;
}

static PyObject *pack_of_thread(PyObject *op, PyObject *x)
{
    GCK_SCOPED PyObject *self = Py_XNewRef((PyObject *)of_thread((gck_saved_hooks *)op));
    return self != NULL ? pack(self, x) : NULL;
}

static PyMethodDef pack_of_thread_def = {"pack", pack_of_thread, METH_O,
    "pack(tensor, /)\n--\n\nReturn what compress_saved() keeps of a tensor that autograd saves."};

/* ---- SavedHooks ---- */

#define OF(field) offsetof(gck_saved_hooks, field)
static const gck_owned hooks_owned[] = {
    OF(outer_pack), OF(outer_unpack), OF(waiting), OF(by_thread), OF(packing.plan.place), OF(formats.rules), 0,
};
#undef OF

static int hooks_traverse(PyObject *op, visitproc visit, void *arg)
{
    return gck_object_visit(op, hooks_owned, visit, arg);
}

static int hooks_clear(PyObject *op) { return gck_owned_clear(op, hooks_owned); }

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

static int is_ours(PyObject *hook)
{
    const PyCFunction function = PyCFunction_CheckExact(hook) ? PyCFunction_GetFunction(hook) : NULL;

    return function == pack || function == pack_of_thread;
}

/* Find the hooks around ours, which see the bytes of our payloads.  Around other hooks of this file
 * they are the hooks of those: the innermost codec counts.  0 or -1. */
static int find_outer(gck_saved_hooks *self, PyObject *top)
{
    PyObject *outer_pack = NULL, *outer_unpack = NULL;

    if (top != Py_None && !PyArg_ParseTuple(top, "OO", &outer_pack, &outer_unpack)) {
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
    return 0;
}

/* Borrowed from the caller.  formats: a tuple, see above; with one, nothing is encoded before its node is known. */
typedef struct {
    PyObject *compress, *formats, *place;
} asked;

/* New reference. */
static gck_saved_hooks *hooks_new(gck_state *state, const asked *what)
{
    gck_plan plan;
    GCK_SCOPED PyObject *place = NULL;
    gck_saved_hooks *self;

    if (gck_options_plan(state, what->compress, &plan) < 0
        || gck_options_place(state, what->place, &plan, &place) < 0) {
        return NULL;
    }
    self = (gck_saved_hooks *)PyType_GenericAlloc(state->SavedHooks, 0);
    if (self == NULL) {
        return NULL;
    }
    gck_give(&place);                            /* the plan of the hooks owns it */
    self->packing = (gck_packing){.state = state, .plan = plan};
    self->formats = gck_saved_formats_of(plan.codec);
    self->waits = plan.codec->max_error > 0 || PyTuple_Size(what->formats) > 0;
    if (gck_saved_formats_read(what->formats, &self->formats) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

/* New reference; NULL: nothing was pushed.  Under other hooks tensors wait in a list of their own. */
static gck_saved_hooks *push_ours(gck_state *state, const asked *what, PyObject *top)
{
    gck_saved_hooks *self = hooks_new(state, what);
    PyObject *op = (PyObject *)self;

    if (self != NULL
        && (find_outer(self, top) < 0
            || (self->waits
                && (self->waiting = self->packing.outer ? gck_saved_list_new() : gck_saved_list_of_thread()) == NULL)
            || gck_hooks_push(&state->py, PyCFunction_New(&pack_def, op), &unpack_def, op) < 0)) {
        Py_CLEAR(self);
    }
    return self;
}

/* Make hooks the innermost ones: ours, or once more those of a region that runs again.  Such a region
 * keeps no saved tensor, so there is nothing to compress, and it needs its saved tensors one by one, in
 * the order in which autograd saves them.  *self: new reference, NULL in a region.  0 or -1. */
static int push(gck_state *state, const asked *what, gck_saved_hooks **self)
{
    gck_hooks_owner owner;
    PyObject *region;
    GCK_SCOPED PyObject *top = gck_innermost_hooks(state, &owner, &region);

    *self = NULL;
    if (top != NULL && (owner == GCK_HOOKS_REGION || owner == GCK_HOOKS_TORCHS_REGION)) {
        state->stats.uncompressed[GCK_SKIP_REGION]++;
        return gck_done(PyObject_Call(state->py.push_hooks, top, NULL));
    }
    *self = top != NULL ? push_ours(state, what, top) : NULL;
    return *self != NULL ? 0 : -1;
}

PyObject *gck_saved_hooks_pair(PyObject *module, PyObject *args)
{
    GCK_SCOPED PyObject *pack = NULL, *unpack = NULL;
    GCK_SCOPED gck_saved_hooks *self = NULL;
    asked what;

    if (!PyArg_ParseTuple(args, "OO!O:saved_pair", &what.compress, &PyTuple_Type, &what.formats, &what.place)
        || (self = hooks_new(gck_state_of(module), &what)) == NULL) {
        return NULL;
    }
    return (self->by_thread = PyDict_New()) != NULL
        && (pack = PyCFunction_New(&pack_of_thread_def, (PyObject *)self)) != NULL
        && (unpack = PyCFunction_New(&unpack_def, (PyObject *)self)) != NULL ? PyTuple_Pack(2, pack, unpack) : NULL;
}

int gck_saved_hooks_are_lossy(PyObject *hooks, int *replay_discrete)
{
    PyObject *hook = PyTuple_Check(hooks) ? PyTuple_GetItem(hooks, 0) : NULL;
    const gck_saved_hooks *self = hook != NULL && is_ours(hook) ? (gck_saved_hooks *)PyCFunction_GetSelf(hook) : NULL;

    *replay_discrete = self != NULL ? self->packing.plan.replay_discrete : 0;
    return self != NULL && (self->waits || gck_plan_is_lossy(&self->packing.plan));
}

PyObject *gck_saved_hooks_are_lossy_py(PyObject *module, PyObject *Py_UNUSED(unused))
{
    GCK_SCOPED PyObject *top = PyObject_CallFunctionObjArgs(gck_state_of(module)->py.top_hooks, Py_True, NULL);
    int replay_discrete;
    const int lossy = top != NULL && gck_saved_hooks_are_lossy(top, &replay_discrete);

    return top == NULL ? NULL : PyBool_FromLong(lossy);
}

PyObject *gck_saved_hooks_push(PyObject *module, PyObject *args)
{
    GCK_SCOPED gck_saved_hooks *self = NULL;
    asked what;

    if (!PyArg_ParseTuple(args, "OO!O:saved_push", &what.compress, &PyTuple_Type, &what.formats, &what.place)
        || push(gck_state_of(module), &what, &self) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Take our hooks, the innermost, off.  Outer hooks now see what still waits, unless the block
 * failed: a recompute has stopped then and takes none.  Without outer hooks it continues to wait
 * for another block of this thread.  0 or -1. */
static int pop(gck_state *state, int failed)
{
    GCK_SCOPED PyObject *top = PyObject_CallFunctionObjArgs(state->py.top_hooks, Py_True, NULL);
    PyObject *hook = top != NULL && top != Py_None ? PyTuple_GetItem(top, 0) : NULL;
    GCK_SCOPED PyObject *op = hook != NULL && is_ours(hook) ? Py_NewRef(PyCFunction_GetSelf(hook)) : NULL;
    gck_saved_hooks *self = (gck_saved_hooks *)op;
    gck_saved_tensor *saved;
    int status = top == NULL ? -1 : 0;

    Py_CLEAR(top);
    gck_hooks_pop(&state->py);
    if (op != NULL && self->waiting != NULL) {
        self->packing.outer = self->packing.outer && !failed;
        for (int i = 2 * GCK_WAITING_TENSORS; status == 0 && i-- > 0;) {
            /* downwards: settling may shorten the list */
            saved = gck_saved_list_known(self->waiting, i);
            if (saved != NULL && saved->hooks == op) {
                status = gck_saved_waiting_settle(saved, NULL, 0, !self->packing.outer, NULL);
            }
        }
    }
    return status;
}

PyObject *gck_saved_hooks_pop(PyObject *module, PyObject *failed)
{
    return pop(gck_state_of(module), failed == Py_True) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Search the nodes behind the function's result.  0 or -1. */
static int look_behind(gck_saved_hooks *self, PyObject *result)
{
    gck_state *state = self->packing.state;
    GCK_SCOPED PyObject *nodes = PyObject_CallFunction(state->py.call.nodes_behind, "(O)", result);
    int status = nodes == NULL ? -1 : 0, tracing;

    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(nodes); i++) {
        const int64_t made = gck_node_number(&state->py, PyList_GetItem(nodes, i));
        status = made < 0 ? -1
               : gck_saved_search(self, PyList_GetItem(nodes, i), made, INT64_MAX, &tracing);
    }
    return status;
}

PyObject *gck_saved_hooks_call(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *function, *tuple, *kwargs;
    GCK_SCOPED PyObject *result = NULL;
    GCK_SCOPED gck_saved_hooks *self = NULL;
    asked what;

    if (!PyArg_ParseTuple(args, "OO!OOO!O!:saved_call", &what.compress, &PyTuple_Type, &what.formats, &what.place,
                          &function, &PyTuple_Type, &tuple, &PyDict_Type, &kwargs)
        || push(state, &what, &self) < 0) {
        return NULL;
    }
    result = PyObject_Call(function, tuple, kwargs);
    if (result != NULL && self != NULL && self->waiting != NULL && look_behind(self, result) < 0) {
        Py_CLEAR(result);
    }
    gck_error error = gck_error_take();
    pop(state, result == NULL);
    return gck_error_return(&error) < 0 ? NULL : gck_give(&result);
}
