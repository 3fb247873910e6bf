/* saver.c: heap type Saver: the pair of hooks that decides how a saved tensor is kept.
 *
 * Nothing is recomputed: pack encodes, unpack decodes.  What has to stay exact is kept as
 * autograd keeps it, detached, so that the graph does not hold itself. */
#include "saver.h"

#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "settling.h"

/* ---- pack ---- */

/* How x is kept: a role, once the tensor may be encoded at all; or the reason why as it is. */
typedef struct {
    gck_role role;
    int      waits;                  /* the role is not known yet                         */
    int      verdict;                /* gck_verdict, or -1                                */
} decision;

/* Is x an output of an autograd Function that is saving just now?  1, 0, -1. */
static int is_being_saved(PyObject *node)
{
    PyObject *to_save;
    int truth;

    if (!(PyType_GetFlags(Py_TYPE(node)) & Py_TPFLAGS_HEAPTYPE)) {
        return 0;                                /* not made in Python */
    }
    to_save = PyObject_GetAttrString(node, "to_save");
    truth = to_save == NULL ? -1 : to_save != Py_None;
    Py_XDECREF(to_save);
    return truth;
}

/* x requires grad: what the graph tells.  `number`: of the node that is being made.  0 or -1. */
static int judge_saver(const gck_saver *self, PyObject *x, PyObject *node, int64_t number, decision *d)
{
    const gck_py *py = &self->packing.state->py;
    const int leaf = node != Py_None ? gck_is_of_leaf(py, x, node) : 0;
    const int64_t made = leaf == 0 && node != Py_None ? gck_node_number(py, node) : 0;
    int role = GCK_ROLE_VALUES, own;

    if (leaf != 0 || made < 0) {
        d->verdict = GCK_KEEP_LEAF;
        return leaf < 0 || made < 0 ? -1 : 0;
    }
    if (self->waiting == NULL || gck_entry_of_region || d->verdict != GCK_COMPRESS) {
        return 0;
    }
    own = made >= number && made != INT64_MAX ? 1 : node != Py_None ? is_being_saved(node) : 0;   /* some have no number */
    if (own > 0) {
        role = made == number ? gck_role_of_result(node, x) : GCK_ROLE_EXACT;
    }
    d->waits = own == 0;
    d->role = (gck_role)role;
    return own < 0 || role < 0 ? -1 : 0;
}

/* Values in memory: those of an expanded tensor are one. */
static int64_t values_of(const gck_tensor *x)
{
    int64_t n = 1;

    for (int d = 0; d < x->ndim; d++) {
        n *= x->strides != NULL && x->strides[d] == 0 ? 1 : x->sizes[d];
    }
    return n;
}

static decision judge(const gck_saver *self, gck_input *in, PyObject *node, int64_t number)
{
    gck_py *py = &self->packing.state->py;
    const gck_plan *plan = &self->packing.plan;
    decision d = {.role = GCK_ROLE_VALUES, .verdict = -1};
    int tracing;

    if (gck_input_read(py, in, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0) {
        return d;
    }
    if ((in->requires_grad && in->leaf && !plan->leaves) || (PyObject *)Py_TYPE(in->x) == py->Parameter) {
        d.verdict = GCK_KEEP_LEAF;
        return d;
    }
    d.role = in->requires_grad ? GCK_ROLE_VALUES : GCK_ROLE_MASK;
    d.verdict = gck_input_judge(py, in, in->requires_grad ? plan->codec : gck_codec_find("mask"), plan->min_numel);
    if (self->waiting != NULL && (d.verdict == GCK_COMPRESS || d.verdict == GCK_KEEP_SMALL)) {
        gck_waiting_note(self->waiting, number, values_of(&in->view));
    }
    if (d.verdict == GCK_KEEP_DTYPE && !in->requires_grad) {
        d.verdict = GCK_KEEP_NO_GRAD;
    }
    if (d.verdict == GCK_COMPRESS && (tracing = gck_tracing(py)) != 0) {
        d.verdict = tracing < 0 ? -1 : GCK_KEEP_TRACING;
    }
    if (in->requires_grad && (d.verdict == GCK_COMPRESS || d.verdict == GCK_KEEP_SMALL)
        && judge_saver(self, in->x, node, number, &d) < 0) {
        d.verdict = -1;
    }
    return d;
}

/* The tensor waits in `to`.  0 or -1. */
static int wait(gck_saver *self, gck_input *in, int64_t number, gck_saved *to)
{
    gck_state *state = self->packing.state;
    gck_packing packing = self->packing;
    const int64_t kept = state->stats.kept_bytes;

    packing.outer = 0;                           /* they see what it becomes */
    if (gck_entry_keep(&packing, in, &to->entry) < 0 || gck_count_kept(state, in->x, GCK_KEEP_UNKNOWN) < 0) {
        return -1;
    }
    if (to->entry.kind != GCK_VERSIONED) {
        return 0;
    }
    to->number = number;
    to->numel = values_of(&in->view);
    to->nbytes = to->waits = state->stats.kept_bytes - kept;
    to->epoch = state->epoch;
    to->saver = Py_NewRef((PyObject *)self);
    gck_count_live(state, to->waits);
    return gck_waiting_add(self->waiting, to, gck_settling_settle);
}

/* Called by autograd for every tensor it saves, without grad.  New reference: a Saved. */
static PyObject *pack(PyObject *op, PyObject *x)
{
    gck_saver *self = (gck_saver *)op;
    gck_state *state = self->packing.state;
    /* First: to ask for the node of a view that was changed in place makes nodes. */
    const int64_t number = self->waiting != NULL ? gck_last_node_number(&state->py) : 0;
    PyObject *node = number < 0 ? NULL : PyObject_GetAttr(x, state->py.names.grad_fn);
    gck_saved *to = node != NULL ? gck_saved_new(state) : NULL;
    gck_input in = gck_input_of(x);
    decision d = {.verdict = -1};
    int done = to == NULL ? -1 : 0;

    if (done == 0 && self->waiting != NULL && node != Py_None) {
        done = gck_waiting_reach(self->waiting, state, node, number, gck_settling_settle);
    }
    if (done == 0) {
        d = judge(self, &in, node, number);
        done = d.verdict < 0 ? -1 : 0;
    }
    if (done == 0 && d.verdict == GCK_COMPRESS && d.waits) {
        done = wait(self, &in, number, to) < 0 ? -1 : 2;
    } else if (done == 0 && d.verdict == GCK_COMPRESS) {
        done = gck_settling_encode(self, d.role, &in, to, &d.verdict);
    }
    if (done == 1) {
        state->stats.asked++;
        state->stats.compressed++;
    } else if (done == 0) {
        done = gck_settling_keep(self, &in, to) < 0 ? -1 : gck_count_kept(state, x, d.verdict);
    }
    if (done >= 0 && done < 2) {
        done = gck_settling_remember(self, to);
    }
    if (done < 0) {
        Py_CLEAR(to);
    }
    Py_XDECREF(node);
    gck_input_clear(&in);
    return (PyObject *)to;
}

/* What autograd gets back: without history, which it has itself. */
static PyObject *unpack(PyObject *op, PyObject *packed)
{
    gck_state *state = ((gck_saver *)op)->packing.state;

    if (Py_TYPE(packed) != state->Saved) {
        return PyErr_Format(PyExc_TypeError, "gradckpt: not a saved tensor of compress_saved(): %R", Py_TYPE(packed));
    }
    return gck_saved_restore((gck_saved *)packed);
}

static PyMethodDef pack_def = {"pack", pack, METH_O, NULL};
static PyMethodDef unpack_def = {"unpack", unpack, METH_O, NULL};

/* ---- Saver ---- */

static int saver_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((gck_saver *)op)->outer_pack);
    Py_VISIT(((gck_saver *)op)->outer_unpack);
    Py_VISIT(((gck_saver *)op)->waiting);
    return 0;
}

static int saver_clear(PyObject *op)
{
    Py_CLEAR(((gck_saver *)op)->outer_pack);
    Py_CLEAR(((gck_saver *)op)->outer_unpack);
    Py_CLEAR(((gck_saver *)op)->waiting);
    return 0;
}

static void saver_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    saver_clear(op);
    PyObject_GC_Del(op);
    Py_DECREF(type);
}

static PyType_Slot saver_slots[] = {
    {Py_tp_dealloc, saver_dealloc},
    {Py_tp_traverse, saver_traverse},
    {Py_tp_clear, saver_clear},
    {0, NULL},
};

PyType_Spec gck_saver_spec = {
    .name = "gradckpt._C.Saver",
    .basicsize = sizeof(gck_saver),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = saver_slots,
};

static int is_ours(PyObject *hook) { return PyCFunction_CheckExact(hook) && PyCFunction_GetFunction(hook) == pack; }

/* The hooks around ours see the bytes of our payloads.  Around other hooks of this file are
 * those that these had: the innermost codec is meant.  0 or -1. */
static int find_outer(gck_saver *self, const gck_py *py)
{
    PyObject *top = PyObject_CallFunctionObjArgs(py->top_hooks, Py_True, NULL);
    PyObject *outer_pack = NULL, *outer_unpack = NULL;

    if (top == NULL || (top != Py_None && !PyArg_ParseTuple(top, "OO", &outer_pack, &outer_unpack))) {
        Py_XDECREF(top);
        return -1;
    }
    if (outer_pack != NULL && is_ours(outer_pack)) {
        const gck_saver *around = (gck_saver *)PyCFunction_GetSelf(outer_pack);
        outer_pack = around->outer_pack;
        outer_unpack = around->outer_unpack;
    }
    self->outer_pack = Py_XNewRef(outer_pack);
    self->outer_unpack = Py_XNewRef(outer_unpack);
    self->packing.outer = outer_pack != NULL;
    Py_DECREF(top);
    return 0;
}

/* New reference; NULL: nothing was pushed.  What waits under hooks of others waits in a list of its
 * own: a region's recompute must keep what its forward kept, whatever else the thread does. */
static gck_saver *push(gck_state *state, PyObject *compress)
{
    gck_plan plan;
    gck_saver *self;

    if (gck_options_plan(state, compress, &plan) < 0) {
        return NULL;
    }
    if (plan.codec == NULL) {
        PyErr_SetString(PyExc_ValueError, "gradckpt: compress_saved() needs a codec");
        return NULL;
    }
    self = PyObject_GC_New(gck_saver, state->Saver);
    if (self == NULL) {
        return NULL;
    }
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->packing = (gck_packing){state, plan, 0, 0, NULL, {NULL, NULL, 0, NULL}};
    PyObject_GC_Track(self);
    if (find_outer(self, &state->py) < 0
        || (plan.codec->max_error > 0
            && (self->waiting = self->packing.outer ? gck_waiting_new() : gck_waiting_of_thread()) == NULL)
        || gck_hooks_push(&state->py, &pack_def, &unpack_def, (PyObject *)self) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

int gck_saver_decisions(PyObject *hooks)
{
    PyObject *hook = PyTuple_Check(hooks) ? PyTuple_GetItem(hooks, 0) : NULL;

    return hook != NULL && is_ours(hook) ? ((gck_saver *)PyCFunction_GetSelf(hook))->packing.plan.decisions : 0;
}

PyObject *gck_saver_push(PyObject *module, PyObject *compress)
{
    gck_saver *self = push(gck_state_of(module), compress);

    Py_XDECREF((PyObject *)self);
    return self == NULL ? NULL : Py_NewRef(Py_None);
}

/* One that goes on waiting when the block has ended: without its graph, of which it may be a result.  0 or -1. */
static int stay(const gck_saver *self, gck_saved *saved)
{
    gck_input in = gck_input_of(saved->entry.value);
    gck_saved *fresh = gck_saved_new(self->packing.state);
    void *storage = NULL;
    int status = fresh == NULL ? -1 : gck_input_read(&self->packing.state->py, &in, GCK_FACT_VERSION);

    Py_INCREF((PyObject *)saved);
    if (status == 0 && in.version == saved->entry.version) {
        status = gck_settling_keep(self, &in, fresh) < 0 || gck_storage_of(in.x, &storage) < 0 ? -1 : 0;
        if (status == 0 && saved->saver != NULL) {
            gck_saved_swap(saved, fresh);
        }
    }
    status = status < 0 || storage == NULL ? status : gck_settling_hold(self, storage);
    Py_DECREF((PyObject *)saved);
    Py_XDECREF((PyObject *)fresh);
    gck_input_clear(&in);
    return status;
}

/* The innermost hooks, ours, come off.  Hooks around them see now what still waits, unless the block
 * failed: a recompute has stopped then, and takes no more.  Without such hooks it may wait for another
 * block of this thread.  0 or -1. */
static int pop(gck_state *state, int failed)
{
    PyObject *top = PyObject_CallFunctionObjArgs(state->py.top_hooks, Py_True, NULL);
    PyObject *hook = top != NULL && top != Py_None ? PyTuple_GetItem(top, 0) : NULL;
    PyObject *op = hook != NULL && is_ours(hook) ? Py_NewRef(PyCFunction_GetSelf(hook)) : NULL;
    gck_saver *self = (gck_saver *)op;
    gck_saved *saved;
    int status = top == NULL ? -1 : 0;

    Py_XDECREF(top);
    gck_hooks_pop(&state->py);
    if (op != NULL && self->waiting != NULL) {
        self->packing.outer = self->packing.outer && !failed;
        status = self->packing.outer ? gck_waiting_end(self->waiting, op, gck_settling_settle) : 0;
        for (int i = 0; status == 0 && (saved = gck_waiting_next(self->waiting, i)) != NULL; i++) {
            status = saved->saver == op ? stay(self, saved) : 0;
        }
    }
    Py_XDECREF(op);
    return status;
}

PyObject *gck_saver_pop(PyObject *module, PyObject *failed)
{
    return pop(gck_state_of(module), failed == Py_True) < 0 ? NULL : Py_NewRef(Py_None);
}

/* What the function returned leads to the nodes that it made.  0 or -1. */
static int look_behind(const gck_saver *self, PyObject *result)
{
    gck_state *state = self->packing.state;
    PyObject *flat = PyObject_CallFunctionObjArgs(state->py.tree_flatten, result, NULL);
    PyObject *leaves = flat != NULL && PyTuple_Check(flat) ? PyTuple_GetItem(flat, 0) : NULL;
    int status = leaves == NULL || !PyList_Check(leaves) ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);                  /* borrowed from a list that is ours */
        PyObject *node = gck_is_tensor(&state->py, leaf) > 0 ? PyObject_GetAttr(leaf, state->py.names.grad_fn) : NULL;
        status = PyErr_Occurred() ? -1 : node != NULL && node != Py_None ? gck_waiting_reach(self->waiting, state, node, INT64_MAX, gck_settling_settle)
            : 0;
        Py_XDECREF(node);
    }
    Py_XDECREF(flat);
    return status;
}

PyObject *gck_saver_call(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *compress, *function, *tuple, *kwargs, *result;
    PyObject *type, *value, *traceback;
    gck_saver *self;

    if (!PyArg_ParseTuple(args, "OOO!O!:saved_call", &compress, &function, &PyTuple_Type, &tuple, &PyDict_Type, &kwargs)
        || (self = push(state, compress)) == NULL) {
        return NULL;
    }
    result = PyObject_Call(function, tuple, kwargs);
    if (result != NULL && self->waiting != NULL && look_behind(self, result) < 0) {
        Py_CLEAR(result);
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (pop(state, result == NULL) < 0) {
        Py_CLEAR(result);
    }
    Py_DECREF((PyObject *)self);
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
    return result;
}
