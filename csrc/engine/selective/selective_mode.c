/* selective_mode.c: heap type Context, the C part of the two modes of a selective region: their
 * __torch_dispatch__.
 *
 * They serve policies that are functions, regions under other modes, and tracing.  Semantics and
 * texts are those of torch's _CachingTorchDispatchMode and _CachedTorchDispatchMode; the classes in
 * gradckpt/_engine/selective.py derive from them and from Context. */
#include "engine/selective/selective_mode.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "engine/selective/active_storage.h"
#include "engine/selective/op_record_replay.h"
#include "engine/selective/op_hiding.h"
#include "engine/selective/op_labels.h"
#include "engine/selective/op_written.h"
#include "engine/selective/replay_discrete.h"
#include "engine/selective/selective.h"

#include <stdlib.h>

/* Type gradckpt._C.Context. */
typedef struct {
    PyObject_HEAD
    gck_op_storage *store;  /* owned; NULL before __init__                         */
    int        by_key;      /* the policy needs no mode                            */
    int        replay;      /* the context of the recompute                        */
    int        traced;      /* a mode that traces was active when it was entered   */
} gck_context;

/* New reference: the store of a context; NULL with TypeError when it has none. */
static gck_op_storage *store_of(const gck_context *self)
{
    if (self->store == NULL) {
        PyErr_SetString(PyExc_TypeError,
                        "gradckpt: a selective context that create_selective_checkpoint_contexts did not make");
        return NULL;
    }
    return (gck_op_storage *)Py_NewRef((PyObject *)self->store);
}

static PyObject *run_call(const gck_call *call) { return PyObject_Call(call->with, call->args, call->kwargs); }

/* 1: torch never keeps the operator's outputs; 0; -1.  A linear search: they are few, and their
 * __hash__ is Python. */
static int is_ignored(gck_py *py, PyObject *func)
{
    if (py->ignored == NULL || PyTuple_Size(py->ignored) != PySet_Size(py->ignored_ops)) {
        GCK_SCOPED PyObject *old = py->ignored;
        py->ignored = PySequence_Tuple(py->ignored_ops);
    }
    for (Py_ssize_t i = 0; py->ignored != NULL && i < PyTuple_Size(py->ignored); i++) {
        if (PyTuple_GetItem(py->ignored, i) == func) {
            return 1;
        }
    }
    return py->ignored != NULL ? 0 : -1;
}

/* New reference: the key under which the calls of the operator are stored.  Higher order operators
 * have neither an `_op` (`target`) nor one key for all of their calls. */
static PyObject *key_of(const gck_py *py, const gck_call *call, const PyObject *target)
{
    if (target != NULL) {
        return Py_NewRef(call->op);
    }
    if (gck_clear_attribute_error() < 0) {
        return NULL;
    }
    return PyObject_CallFunction(py->call.selective_key, "OO", call->op, call->args);
}

/* Record or replay the call, or only run it, as outside of this thread's `with`. */
static PyObject *dispatch(const gck_context *self, gck_op_storage *store, gck_call *call)
{
    gck_py *py = &store->state->py;
    const int line = gck_op_storage_find(store, call), ignored = line == GCK_LINE_BY_KEY ? is_ignored(py, call->op) : 0;
    GCK_SCOPED PyObject *target = PyObject_GetAttr(call->op, py->names._op), *key = NULL;
    PyObject *out = NULL;

    call->with = target != NULL ? target : call->op;
    call->higher_order = target == NULL;
    call->key = key = key_of(py, call, target);
    if (call->key != NULL && ignored >= 0) {
        gck_active *active = ignored || line == GCK_LINE_NONE ? NULL : gck_active_of(store->state, call->context);
        PyObject *x = active != NULL && PyTuple_Size(call->args) > 0 ? PyTuple_GetItem(call->args, 0) : NULL;
        const int kept = x != NULL ? gck_is_kept_memory(store->state, x) : 0;
        const gck_op_effect effect = kept > 0 ? gck_op_effect_of(py, call->op) : GCK_READS;
        if (kept < 0 || (effect != GCK_READS && gck_effect_begin(store->state, effect, x) < 0)) {
            out = NULL;
        } else if (active == NULL || active->hidden) {
            out = run_call(call);
        } else {
            out = self->replay ? gck_replay_call(active, call) : gck_record_call(active, store, line, call);
        }
        if (out != NULL && effect == GCK_VIEWS_UNSEEN && gck_effect_end(store->state, x, out) < 0) {
            Py_CLEAR(out);
        }
    }
    return out;
}

/* New reference: under tracing of a forward, whose graph takes every output and torch's marks, the
 * result of torch's own mode; NotImplemented where nothing is traced. */
static PyObject *record_traced(gck_op_storage *store, const gck_call *call, PyObject *types)
{
    const gck_py *py = &store->state->py;
    const int modes = store->policy != NULL ? gck_ask(py->dispatch_stack_len) : 0;
    PyObject *out;

    if (modes <= 0) {
        return modes < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    out = PyObject_CallFunction(py->call.record_traced, "OOOOO", call->context, call->op, types, call->args,
                                call->kwargs != NULL ? call->kwargs : Py_None);
    store->traced |= out != NULL && out != Py_NotImplemented;
    return out;
}

/* 1 while something is traced inside of the region, as a higher order operator traces what it differentiates; 0; -1.
 * Modes of torch that trace lie below ours, which thus sees operators on tensors without values. */
static int traces_inside(const gck_context *self, const gck_py *py)
{
    return self->traced ? 0 : gck_tracing_modes(py);
}

/* __torch_dispatch__(func, types, args=(), kwargs=None): one operator. */
static PyObject *context_dispatch(PyObject *op, PyObject *const *all, Py_ssize_t n)
{
    const gck_context *self = (gck_context *)op;
    GCK_SCOPED gck_op_storage *store = store_of(self);
    gck_call call = {.run = run_call, .context = op};

    if (store == NULL) {
        return NULL;
    }
    if (n < 3 || n > 4 || !PyTuple_Check(all[2]) || (n == 4 && all[3] != Py_None && !PyDict_Check(all[3]))) {
        return PyErr_Format(PyExc_TypeError,
                            "gradckpt: __torch_dispatch__ takes a tuple of arguments and a dict of keywords");
    }
    call.op = all[0];
    call.args = all[2];
    call.kwargs = n == 4 && all[3] != Py_None && PyDict_Size(all[3]) > 0 ? all[3] : NULL;
    const int inside = traces_inside(self, &store->state->py);
    if (inside != 0) {
        return inside > 0 ? PyObject_Call(call.op, call.args, call.kwargs) : NULL;
    }
    GCK_SCOPED PyObject *out = self->replay ? Py_NewRef(Py_NotImplemented) : record_traced(store, &call, all[1]);
    return out == Py_NotImplemented ? dispatch(self, store, &call) : gck_give(&out);
}

/* ---- with context: ---- */

/* 1: by key; 0: by a mode, under tracing and where another mode watches; -1. */
static int may_use_key(const gck_context *self)
{
    const gck_state *state = self->store->state;
    const int wanted = self->by_key && gck_catches_by_key(state, self->store);
    const int modes = wanted ? gck_modes_that_watch(&state->py) : 0;
    const int compiling = wanted && modes == 0 ? gck_ask(state->py.is_compiling) : 0;

    return modes < 0 || compiling < 0 ? -1 : wanted && !modes && !compiling;
}

/* It is in C so that no signal handler runs between the key and the with statement. */
static PyObject *context_enter(PyObject *op, PyObject *Py_UNUSED(unused))
{
    gck_context *self = (gck_context *)op;
    GCK_SCOPED gck_op_storage *store = store_of(self);
    const int by_key = store != NULL ? may_use_key(self) : -1;
    gck_active *active = NULL;
    PyObject *result = NULL;

    self->traced = by_key == 0 ? gck_tracing_modes(&store->state->py) : 0;
    if (by_key < 0 || self->traced < 0
        || (!self->replay && gck_region_replays_discrete(store->state, 0, 0, &store) < 0)) {
        return NULL;
    }
    if ((active = malloc(sizeof *active)) == NULL) {
        return PyErr_NoMemory();
    }
    if (gck_selective_begin(store->state, active, store, self->replay, by_key, gck_context_run_of(op)) == 0) {
        active->context = op;
        result = by_key ? Py_NewRef(op) : PyObject_CallMethod(op, "enter_mode", NULL);
        if (result == NULL) {
            gck_selective_end(store->state, active);
        }
    }
    if (result == NULL) {
        free(active);
    }
    return result;
}

static PyObject *context_exit(PyObject *op, PyObject *error)
{
    GCK_SCOPED gck_op_storage *store = store_of((gck_context *)op);
    gck_active *active = store != NULL ? gck_active_of(store->state, op) : NULL;
    const int by_key = active != NULL && active->by_key;
    PyObject *type = PyTuple_Size(error) > 0 ? PyTuple_GetItem(error, 0) : Py_None;
    GCK_SCOPED PyObject *method = NULL, *result = NULL;
    gck_error judged = {NULL};

    if (active != NULL) {
        const int stopped = type == store->state->py.StopRecomputation;
        if (!active->replay || (!stopped && type != Py_None)) {
            gck_selective_end(store->state, active);
        } else if (gck_selective_finish(store->state, active, stopped) < 0) {
            judged = gck_error_take();
        }
        free(active);
    }
    if (by_key) {
        result = Py_NewRef(Py_None);
    } else {
        method = store != NULL ? PyObject_GetAttrString(op, "exit_mode") : NULL;
        result = method != NULL ? PyObject_Call(method, error, NULL) : NULL;
    }
    /* Only a forward has candidates.  A failed one leaves none either. */
    if (result != NULL && PyTuple_Size(error) > 0 && type == Py_None && gck_op_labels_finish(store) < 0) {
        Py_CLEAR(result);
    }
    return gck_error_return(&judged) < 0 ? NULL : gck_give(&result);
}

/* ---- the type ---- */

static int context_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    gck_context *self = (gck_context *)op;
    PyObject *store;
    int by_key, replay;

    if (!PyArg_ParseTuple(args, "Opp:Context", &store, &by_key, &replay)) {
        return -1;
    }
    if (kwargs != NULL || !gck_is_op_storage(store)) {
        return gck_done(PyErr_Format(
            PyExc_TypeError, "gradckpt: a selective context takes an OpStorage, not %R", store));
    }
    GCK_SCOPED gck_op_storage *old = self->store;
    self->store = (gck_op_storage *)Py_NewRef(store);
    self->store->shown = -1;
    self->by_key = by_key;
    self->replay = replay;
    return 0;
}

static const gck_owned context_owned[] = {offsetof(gck_context, store), 0};

static int context_traverse(PyObject *op, visitproc visit, void *arg)
{
    return gck_object_visit(op, context_owned, visit, arg);
}

static int context_clear(PyObject *op) { return gck_owned_clear(op, context_owned); }

static void context_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    context_clear(op);
    gck_object_free(op);
}

static PyObject *context_get(PyObject *op, void *Py_UNUSED(unused))
{
    gck_op_storage *store = ((gck_context *)op)->store;

    return store != NULL ? gck_op_storage_picture(store) : Py_NewRef(Py_None);
}

static int context_set(PyObject *op, PyObject *value, void *Py_UNUSED(unused))
{
    const gck_op_storage *store = ((gck_context *)op)->store;

    if (store == NULL || value != store->storage) {
        return gck_done(PyErr_Format(
            PyExc_TypeError,
            "gradckpt: a selective context has a storage of its own; make new contexts instead"));
    }
    return 0;
}

static PyObject *context_get_shown(PyObject *op, void *Py_UNUSED(unused))
{
    const gck_op_storage *store = ((gck_context *)op)->store;

    return Py_NewRef(store == NULL || store->shown < 0 ? Py_None : store->shown ? Py_True : Py_False);
}

static int context_set_shown(PyObject *op, PyObject *value, void *Py_UNUSED(unused))
{
    gck_op_storage *store = ((gck_context *)op)->store;
    const int shown = value == NULL || value == Py_None ? -1 : PyObject_IsTrue(value);

    if (store == NULL || PyErr_Occurred()) {
        return PyErr_Occurred() ? -1 : 0;
    }
    store->shown = shown;
    return 0;
}

static PyMethodDef context_methods[] = {
    {"__enter__", context_enter, METH_NOARGS, "Catch operators in this thread."},
    {"__exit__", context_exit, METH_VARARGS, "Catch them no longer."},
    {"__torch_dispatch__", (PyCFunction)(void (*)(void))context_dispatch, METH_FASTCALL,
     "Run one operator, or give back what it returned."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef context_getset[] = {
    {"storage", context_get, context_set, "{operator: {call: what is kept of it}}.", NULL},
    {"respect_saved_tensors_hooks", context_get_shown, context_set_shown,
     "Whether saved-tensor hooks around the region see what is kept; None: torch's default.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot context_slots[] = {
    {Py_tp_init, context_init},
    {Py_tp_dealloc, context_dealloc},
    {Py_tp_traverse, context_traverse},
    {Py_tp_clear, context_clear},
    {Py_tp_methods, context_methods},
    {Py_tp_getset, context_getset},
    {Py_tp_doc, "The C part of the contexts of a selective region."},
    {0, NULL},
};

PyType_Spec gck_context_spec = {
    .name = "gradckpt._C.Context",
    .basicsize = sizeof(gck_context),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = context_slots,
};

gck_op_storage *gck_context_store(const gck_state *state, PyObject *context)
{
    return context != NULL && PyObject_TypeCheck(context, state->Context) ? ((gck_context *)context)->store : NULL;
}

/* gradckpt._C.selective_name(x, name, modes): in regions that catch by key, and in our modes among
 * these. */
PyObject *gck_selective_name(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    const unsigned long thread = PyThread_get_thread_ident();
    PyObject *x, *name, *modes;

    if (!PyArg_ParseTuple(args, "OOO!:selective_name", &x, &name, &PyList_Type, &modes)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(modes); i++) {
        PyObject *mode = PyList_GetItem(modes, i);
        gck_op_storage *store = gck_context_store(state, mode);
        if (store != NULL && !((gck_context *)mode)->replay && gck_op_label(store, x, name) < 0) {
            return NULL;
        }
    }
    for (gck_active *a = gck_active_here(state->active, thread); a != NULL; a = gck_active_here(a->outer, thread)) {
        if (!a->replay && gck_op_label(a->store, x, name) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}
