/* mode.c: heap type Context, the part in C of the two modes of a selective region: their __torch_dispatch__.
 *
 * They serve policies that are functions, regions under modes of others, and who traces.  Semantics and texts are
 * those of torch's _CachingTorchDispatchMode and _CachedTorchDispatchMode; the classes, in gradckpt/selective.py,
 * derive from them and from Context. */
#include "options.h"
#include "selective.h"

#include <stdlib.h>

/* Type gradckpt._C.Context. */
typedef struct {
    PyObject_HEAD
    gck_store *store;                /* owned; NULL before __init__                         */
    PyObject  *counter;              /* torch's `func_counter`: dict; owned, NULL at first  */
    int        by_key;               /* the policy needs no mode                            */
    int        replay;               /* of the recompute                                    */
} gck_context;

/* What one call of __torch_dispatch__ is about; borrowed, but for `store` and the last two. */
typedef struct {
    gck_store *store;
    PyObject  *self, *func, *types, *args, *kwargs;
    PyObject  *key;                  /* under which the operator is stored                  */
    PyObject  *call;                 /* what runs it                                        */
} gck_dispatch;

/* New reference: the store of a context; NULL with TypeError when it has none. */
static gck_store *store_of(const gck_context *self)
{
    if (self->store == NULL) {
        PyErr_SetString(PyExc_TypeError, "gradckpt: a selective context that create_selective_checkpoint_contexts did not make");
        return NULL;
    }
    return (gck_store *)Py_NewRef((PyObject *)self->store);
}

/* Key and callable of the operator.  Higher order operators have neither an `_op` nor
 * one key for all of their calls.  0 or -1. */
static int identify(gck_dispatch *d)
{
    const gck_py *py = &d->store->state->py;

    d->call = PyObject_GetAttr(d->func, py->names._op);
    if (d->call != NULL) {
        d->key = Py_NewRef(d->func);
        return 0;
    }
    if (gck_clear_attribute_error() < 0) {
        return -1;
    }
    d->call = Py_NewRef(d->func);
    d->key = PyObject_CallMethod(py->selection, "selective_key", "OO", d->func, d->args);
    return d->key == NULL ? -1 : 0;
}

/* 1: somebody traces a forward, whose graph takes every output and torch's marks; 0; -1. */
static int is_traced(const gck_dispatch *d)
{
    const gck_py *py = &d->store->state->py;
    const int modes = gck_ask(py->dispatch_stack_len);
    PyObject *result;
    int truth;

    if (modes <= 0 || d->store->policy == NULL) {
        return modes < 0 ? -1 : 0;
    }
    result = PyObject_CallMethod(py->selection, "traced_forward", "O", d->self);
    truth = result != NULL ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return truth;
}

static PyObject *record_as_torch(gck_dispatch *d)
{
    d->store->traced = 1;
    return PyObject_CallMethod(d->store->state->py.selection, "record_as_torch", "OOOOO", d->self, d->func, d->types, d->args,
                               d->kwargs != NULL ? d->kwargs : Py_None);
}

/* What the policy says of the call: 1: keep, by *plan; 0: recompute; -1. */
static int ask(gck_dispatch *d, PyObject *out, gck_plan *plan)
{
    gck_state *state = d->store->state;
    PyObject *compress = PyObject_CallMethod(state->py.selection, "ask", "OOOOO", d->self, d->func, d->args,
                                             d->kwargs != NULL ? d->kwargs : Py_None, out);
    int keep = compress == NULL ? -1 : compress != Py_False;

    plan->codec = NULL;
    if (keep > 0 && gck_options_plan(state, compress, plan) < 0) {
        keep = -1;
    }
    Py_XDECREF(compress);
    return keep;
}

/* New reference: the calls of d->key in the storage; made when there are none and `make`. */
static PyObject *calls_of(gck_dispatch *d, int make)
{
    PyObject *storage = d->store->storage;
    PyObject *calls = Py_XNewRef(PyDict_GetItemWithError(storage, d->key));

    if (calls == NULL && make && !PyErr_Occurred()) {
        calls = PyDict_New();
        if (calls != NULL && PyDict_SetItem(storage, d->key, calls) < 0) {
            Py_CLEAR(calls);
        }
    }
    if (calls != NULL && !PyDict_Check(calls)) {
        PyErr_Format(PyExc_TypeError, "gradckpt: somebody has put %R into the storage of a selective region", calls);
        Py_CLEAR(calls);
    }
    return calls;
}

/* The operators that are named: index, -1 for any other; -2: a function says which, or the trace kept all. */
static int named(const gck_dispatch *d)
{
    return d->store->traced || (d->store->policy != NULL && d->store->policy->asks) ? -2 : gck_store_find(d->store, d->func, d->args, d->kwargs);
}

/* Of a policy that is a function: what it says of this call. */
static int record_answer(gck_dispatch *d, gck_draw *draw, PyObject *out)
{
    PyObject *calls = calls_of(d, 1);
    PyObject *index = calls != NULL ? PyLong_FromSsize_t(PyDict_Size(calls)) : NULL;
    gck_plan plan;
    int keep = -1;

    /* Before the policy runs: it may call operators, too. */
    if (index != NULL && gck_store_skip(d->store, calls, index) == 0) {
        keep = ask(d, out, &plan);
    }
    if (keep > 0 && plan.codec != NULL && plan.decisions > d->store->decisions
        && gck_region_decides_from(d->store->state, d->store, plan.decisions) < 0) {
        keep = -1;
    }
    const gck_named *deciding = keep >= 0 ? gck_store_deciding(d->store, d->key, d->args, d->kwargs) : NULL;
    const int decide = deciding != NULL && (keep == 0 || deciding->keep == GCK_CHOOSE);
    PyObject *modes;
    if (keep > 0 || decide) {
        const gck_call call = {d->key, d->args, d->kwargs, NULL, NULL};
        keep = gck_hide_begin(d->store->state, &modes);
        if (keep == 0) {
            keep = decide ? gck_store_decide(d->store, calls, index, &call, deciding->form, out)
                          : gck_store_keep(d->store, calls, index, out, &plan);
            keep = keep == 0 && decide ? gck_store_tell(d->store, d->key, index, &call) : keep;
            keep = keep == 0 && draw->before != NULL ? gck_store_drew(d->store, d->key, index, draw) : keep;
            keep = gck_hide_end(d->store->state, modes) < 0 ? -1 : keep;
        }
    }
    Py_XDECREF(calls);
    Py_XDECREF(index);
    return keep < 0 ? -1 : 0;
}

/* New reference: which call of d->key this is, counted in the mode. */
static PyObject *next_index(gck_dispatch *d)
{
    gck_context *self = (gck_context *)d->self;
    PyObject *counter = Py_XNewRef(self->counter != NULL ? self->counter : (self->counter = PyDict_New()));
    PyObject *index = counter != NULL ? PyDict_GetItemWithError(counter, d->key) : NULL;
    const long long number = index != NULL ? PyLong_AsLongLong(index) : 0;
    PyObject *next = PyErr_Occurred() ? NULL : PyLong_FromLongLong(number + 1);
    const int status = next == NULL || counter == NULL ? -1 : PyDict_SetItem(counter, d->key, next);

    Py_XDECREF(counter);
    Py_XDECREF(next);
    return status < 0 ? NULL : PyLong_FromLongLong(number);
}

static PyObject *replay_answer(gck_dispatch *d, int *again)
{
    PyObject *index = next_index(d);
    PyObject *calls = index != NULL ? calls_of(d, 0) : NULL;
    PyObject *out = NULL;
    const gck_call call = {d->key, d->args, d->kwargs, NULL, NULL};

    PyObject *modes;
    const int same = index != NULL && !PyErr_Occurred() ? gck_store_is_told(d->store, d->key, index, &call, 1) : -1;
    *again = same == 0;
    if (same > 0 && gck_hide_begin(d->store->state, &modes) == 0) {
        out = gck_store_replay(d->store, &call, d->key, calls, index, 0, again);
        if (gck_hide_end(d->store->state, modes) < 0) {
            Py_CLEAR(out);
            *again = 0;
        }
    }
    Py_XDECREF(calls);
    Py_XDECREF(index);
    return out;
}

static PyObject *run_call(const gck_call *call) { return PyObject_Call(call->with, call->args, call->kwargs); }

static PyObject *replay(gck_dispatch *d)
{
    const int i = named(d);
    const gck_call call = {d->key, d->args, d->kwargs, run_call, d->call};
    gck_active *active = i >= 0 ? gck_active_of(d->store->state, d->self) : NULL;
    int again = i == -1 || (i >= 0 && active == NULL);   /* not entered in this thread: nothing is replayed */
    PyObject *out = active != NULL ? gck_replay_call(d->store, i, &active->next[i], &call) : i == -2 ? replay_answer(d, &again) : NULL;

    return again ? run_call(&call) : out;
}

static PyObject *record(gck_dispatch *d)
{
    const int i = named(d);
    const gck_call call = {d->key, d->args, d->kwargs, run_call, d->call};
    gck_py *py = &d->store->state->py;
    gck_draw draw = {NULL, NULL};

    if (i >= -1) {
        return i >= 0 ? gck_record_call(d->store, i, &call) : run_call(&call);
    }
    const int draws = gck_op_draws(py, d->func);
    PyObject *out = draws < 0 || (draws && gck_draw_begin(py, d->args, d->kwargs, &draw) < 0) ? NULL : run_call(&call);

    if (out != NULL && record_answer(d, &draw, out) < 0) {
        Py_CLEAR(out);
    }
    gck_draw_clear(&draw);
    return out;
}

/* 1: torch never keeps what the operator returns; 0; -1.  Few they are, and their __hash__ is Python. */
static int is_ignored(gck_py *py, PyObject *func)
{
    const Py_ssize_t n = PySet_Size(py->ignored_ops);

    if (n < 0 || (n > 0 && (py->ignored == NULL || PyTuple_Size(py->ignored) != n))) {
        PyObject *old = py->ignored;
        py->ignored = n < 0 ? NULL : PySequence_Tuple(py->ignored_ops);
        Py_XDECREF(old);
        if (py->ignored == NULL) {
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyTuple_GetItem(py->ignored, i) == func) {
            return 1;
        }
    }
    return 0;
}

/* __torch_dispatch__(func, types, args=(), kwargs=None): one operator. */
static PyObject *context_dispatch(PyObject *op, PyObject *const *all, Py_ssize_t n)
{
    const int replays = ((gck_context *)op)->replay;
    gck_dispatch d = {.self = op, .store = store_of((gck_context *)op)};
    PyObject *out = NULL;
    int traced, ignored;

    if (d.store == NULL) {
        return NULL;
    }
    if (n < 3 || n > 4 || !PyTuple_Check(all[2]) || (n == 4 && all[3] != Py_None && !PyDict_Check(all[3]))) {
        PyErr_SetString(PyExc_TypeError, "gradckpt: __torch_dispatch__ takes a tuple of arguments and a dict of keywords");
        goto exit;
    }
    d.func = all[0];
    d.types = all[1];
    d.args = all[2];
    d.kwargs = n == 4 && all[3] != Py_None && PyDict_Size(all[3]) > 0 ? all[3] : NULL;
    if ((traced = replays ? 0 : is_traced(&d)) != 0) {
        out = traced < 0 ? NULL : record_as_torch(&d);
    } else if ((ignored = is_ignored(&d.store->state->py, d.func)) >= 0 && identify(&d) == 0) {
        out = ignored ? PyObject_Call(d.call, d.args, d.kwargs) : replays ? replay(&d) : record(&d);
    }

exit:
    Py_XDECREF((PyObject *)d.store);
    Py_XDECREF(d.key);
    Py_XDECREF(d.call);
    return out;
}

/* ---- with context: ---- */

/* 1: by key; 0: a mode, where somebody traces and where somebody's mode watches; -1. */
static int may_use_key(const gck_context *self)
{
    const gck_state *state = self->store->state;
    const int wanted = self->by_key && gck_catches_by_key(state, self->store);
    const int modes = wanted ? gck_ask(state->py.dispatch_stack_len) : 0;
    const int compiling = wanted && modes == 0 ? gck_ask(state->py.is_compiling) : 0;

    return modes < 0 || compiling < 0 ? -1 : wanted && !modes && !compiling;
}

/* In C, so that no signal handler runs between the key and the with statement. */
static PyObject *context_enter(PyObject *op, PyObject *unused)
{
    gck_context *self = (gck_context *)op;
    gck_store *store = store_of(self);
    const int by_key = store != NULL ? may_use_key(self) : -1;
    gck_active *active = NULL;
    PyObject *result = NULL;

    (void)unused;
    if (by_key < 0 || (!self->replay && gck_region_decides(store->state, 0, &store) < 0)) {
        goto exit;
    }
    if ((active = malloc(sizeof *active)) == NULL) {
        PyErr_NoMemory();
    } else if (gck_selective_begin(store->state, active, store, self->replay, by_key) < 0) {
        free(active);
    } else {
        active->context = op;
        result = by_key ? Py_NewRef(op) : PyObject_CallMethod(op, "enter_mode", NULL);
        if (result == NULL) {
            gck_selective_end(store->state, active);
            free(active);
        }
    }

exit:
    Py_XDECREF((PyObject *)store);
    return result;
}

static PyObject *context_exit(PyObject *op, PyObject *error)
{
    gck_store *store = store_of((gck_context *)op);
    gck_active *active = store != NULL ? gck_active_of(store->state, op) : NULL;
    const int by_key = active != NULL && active->by_key;
    PyObject *method, *result;

    if (active != NULL) {
        gck_selective_end(store->state, active);
        free(active);
    }
    if (by_key) {
        result = Py_NewRef(Py_None);
    } else {
        method = store != NULL ? PyObject_GetAttrString(op, "exit_mode") : NULL;
        result = method != NULL ? PyObject_Call(method, error, NULL) : NULL;
        Py_XDECREF(method);
    }
    /* Only a forward has candidates; one that failed leaves none either. */
    if (result != NULL && PyTuple_Size(error) > 0 && PyTuple_GetItem(error, 0) == Py_None && gck_store_finish(store) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF((PyObject *)store);
    return result;
}

/* ---- the type ---- */

static int context_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    gck_context *self = (gck_context *)op;
    PyObject *store;
    gck_store *old = self->store;
    int by_key, replay;

    if (!PyArg_ParseTuple(args, "Opp:Context", &store, &by_key, &replay)) {
        return -1;
    }
    if (kwargs != NULL || !gck_is_store(store)) {
        PyErr_Format(PyExc_TypeError, "gradckpt: a selective context takes a Store, not %R", store);
        return -1;
    }
    self->store = (gck_store *)Py_NewRef(store);
    self->by_key = by_key;
    self->replay = replay;
    Py_XDECREF((PyObject *)old);
    return 0;
}

static int context_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT((PyObject *)((gck_context *)op)->store);
    Py_VISIT(((gck_context *)op)->counter);
    return 0;
}

static int context_clear(PyObject *op)
{
    Py_CLEAR(((gck_context *)op)->store);
    Py_CLEAR(((gck_context *)op)->counter);
    return 0;
}

static void context_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    context_clear(op);
    PyObject_GC_Del(op);
    Py_DECREF(type);
}

/* `which`: NULL for the storage, which is the store's; else the counter. */
static PyObject *context_get(PyObject *op, void *which)
{
    const gck_context *self = (gck_context *)op;
    PyObject *value = which != NULL ? self->counter : self->store != NULL ? self->store->storage : NULL;

    return Py_NewRef(value != NULL ? value : Py_None);
}

static int context_set(PyObject *op, PyObject *value, void *which)
{
    gck_context *self = (gck_context *)op;

    if (which == NULL ? self->store == NULL || value != self->store->storage : value == NULL || !PyDict_Check(value)) {
        PyErr_Format(PyExc_TypeError, "gradckpt: a selective context has a %s of its own; make new contexts instead",
                     which == NULL ? "storage" : "func_counter");
        return -1;
    }
    if (which != NULL) {
        PyObject *old = self->counter;
        self->counter = Py_NewRef(value);
        Py_XDECREF(old);
    }
    return 0;
}

static PyMethodDef context_methods[] = {
    {"__enter__", context_enter, METH_NOARGS, "Catch operators in this thread."},
    {"__exit__", context_exit, METH_VARARGS, "Catch them no longer."},
    {"__torch_dispatch__", (PyCFunction)(void (*)(void))context_dispatch, METH_FASTCALL, "Run one operator, or give back what it returned."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef context_getset[] = {
    {"storage", context_get, context_set, "{operator: {call: what is kept of it}}.", NULL},
    {"func_counter", context_get, context_set, "{operator: number of its calls}, under a mode.", (void *)context_methods},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot context_slots[] = {
    {Py_tp_init, context_init},
    {Py_tp_dealloc, context_dealloc},
    {Py_tp_traverse, context_traverse},
    {Py_tp_clear, context_clear},
    {Py_tp_methods, context_methods},
    {Py_tp_getset, context_getset},
    {Py_tp_doc, "What the contexts of a selective region do in C."},
    {0, NULL},
};

PyType_Spec gck_context_spec = {
    .name = "gradckpt._C.Context",
    .basicsize = sizeof(gck_context),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = context_slots,
};

int gck_context_name(PyObject *context, PyObject *x, PyObject *name)
{
    const gck_context *self = (gck_context *)context;

    return self->store == NULL || self->replay ? 0 : gck_store_name(self->store, x, name);
}
