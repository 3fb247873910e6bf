/* mode.c: __torch_dispatch__ of the two modes behind a policy that is a function.
 *
 * Semantics and texts are those of torch's _CachingTorchDispatchMode and
 * _CachedTorchDispatchMode; the classes, in gradckpt/selective.py, derive from them. */
#include "options.h"
#include "selective.h"

#include <stdlib.h>

/* What one call of __torch_dispatch__ is about; borrowed, but for `store` and `key`. */
typedef struct {
    gck_store *store;
    PyObject  *self, *func, *types, *args, *kwargs;
    PyObject  *key;                  /* under which the operator is stored                  */
    PyObject  *call;                 /* what runs it                                        */
} gck_dispatch;

static int dispatch_begin(PyObject *self, PyObject *all, gck_dispatch *d)
{
    *d = (gck_dispatch){.self = self};
    d->store = (gck_store *)PyObject_GetAttrString(self, "_store");
    if (d->store == NULL || !PyArg_ParseTuple(all, "OO|OO:__torch_dispatch__", &d->func, &d->types, &d->args, &d->kwargs)) {
        return -1;
    }
    d->kwargs = d->kwargs == Py_None ? NULL : d->kwargs;
    if (d->args == NULL || !PyTuple_Check(d->args)) {
        PyErr_SetString(PyExc_TypeError, "gradckpt: __torch_dispatch__ takes a tuple of arguments");
        return -1;
    }
    return 0;
}

static void dispatch_end(gck_dispatch *d)
{
    Py_XDECREF((PyObject *)d->store);
    Py_XDECREF(d->key);
    Py_XDECREF(d->call);
}

/* Key and callable of the operator.  Higher order operators have neither an `_op` nor
 * one key for all of their calls.  0 or -1. */
static int identify(gck_dispatch *d)
{
    const gck_py *py = &d->store->state->py;

    d->call = PyObject_GetAttrString(d->func, "_op");
    if (d->call != NULL) {
        d->key = Py_NewRef(d->func);
        return 0;
    }
    PyErr_Clear();
    d->call = Py_NewRef(d->func);
    d->key = PyObject_CallMethod(py->selection, "selective_key", "OO", d->func, d->args);
    return d->key == NULL ? -1 : 0;
}

/* 1: somebody traces this; torch's own method then knows what to do; 0; -1. */
static int is_traced(const gck_dispatch *d)
{
    const gck_py *py = &d->store->state->py;
    const int modes = gck_ask(py->dispatch_stack_len);
    PyObject *result;
    int truth;

    if (modes <= 0) {
        return modes;
    }
    result = PyObject_CallMethod(py->selection, "proxy_mode_active", NULL);
    truth = result != NULL ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return truth;
}

static PyObject *as_torch(gck_dispatch *d, const char *mode)
{
    return PyObject_CallMethod(d->store->state->py.selection, "dispatch_as_torch", "sOOOOO", mode, d->self, d->func,
                               d->types, d->args, d->kwargs != NULL ? d->kwargs : Py_None);
}

/* New reference: policy(context, func, *args, **kwargs). */
static PyObject *ask(gck_dispatch *d, PyObject *out)
{
    const gck_py *py = &d->store->state->py;
    const Py_ssize_t n = PyTuple_Size(d->args);
    PyObject *policy = PyObject_GetAttrString(d->self, "policy_fn");
    PyObject *context = PyObject_CallMethod(py->selection, "selective_context", "(O)", out);
    PyObject *all = policy && context ? PyTuple_New(n + 2) : NULL, *answer = NULL;

    if (all != NULL) {
        PyTuple_SetItem(all, 0, Py_NewRef(context));
        PyTuple_SetItem(all, 1, Py_NewRef(d->func));
        for (Py_ssize_t i = 0; i < n; i++) {
            PyTuple_SetItem(all, i + 2, Py_NewRef(PyTuple_GetItem(d->args, i)));
        }
        answer = PyObject_Call(policy, all, d->kwargs);
    }
    Py_XDECREF(policy);
    Py_XDECREF(context);
    Py_XDECREF(all);
    return answer;
}

/* 1: keep, by *plan; 0: recompute; -1. */
static int understand(gck_dispatch *d, PyObject *answer, gck_plan *plan)
{
    gck_state *state = d->store->state;
    PyObject *read, *compress;
    int keep;

    plan->codec = NULL;
    if (answer == Py_False || answer == state->py.prefer_recompute || answer == state->py.must_recompute) {
        return 0;
    }
    read = PyObject_CallMethod(state->py.selection, "read_policy", "OO", answer, d->func);
    if (read == NULL) {
        return -1;
    }
    if (!PyArg_ParseTuple(read, "iO", &keep, &compress) || (keep && gck_options_plan(state, compress, plan) < 0)) {
        keep = -1;
    }
    Py_DECREF(read);
    return keep;
}

/* Borrowed: the calls of d->key in the storage; made when there are none and `make`. */
static PyObject *calls_of(gck_dispatch *d, int make)
{
    PyObject *storage = d->store->storage;
    PyObject *calls = PyDict_GetItemWithError(storage, d->key);

    if (calls == NULL && make && !PyErr_Occurred()) {
        PyObject *made = PyDict_New();
        if (made != NULL && PyDict_SetItem(storage, d->key, made) == 0) {
            calls = made;
        }
        Py_XDECREF(made);                        /* the storage has it */
    }
    return calls;
}

/* The operators of a policy that names them: index, -1 for any other; -2: it is a function. */
static int named(const gck_dispatch *d)
{
    return d->store->policy != NULL && d->store->policy->asks ? -2 : gck_store_find(d->store, d->func, d->args, d->kwargs);
}

/* Of a policy that is a function: what it says of this call. */
static int record_answer(gck_dispatch *d, gck_draw *draw, PyObject *out)
{
    PyObject *calls = calls_of(d, 1);
    PyObject *index = calls != NULL ? PyLong_FromSsize_t(PyDict_Size(calls)) : NULL;
    PyObject *answer = NULL;
    gck_plan plan;
    int keep = -1;

    /* Before the policy runs: it may call operators, too. */
    if (index != NULL && gck_store_skip(d->store, calls, index) == 0 && (answer = ask(d, out)) != NULL) {
        keep = understand(d, answer, &plan);
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
            keep = keep == 0 && draw->before != NULL ? gck_store_drew(d->store, d->key, index, draw) : keep;
            keep = gck_hide_end(d->store->state, modes) < 0 ? -1 : keep;
        }
    }
    Py_XDECREF(index);
    Py_XDECREF(answer);
    return keep < 0 ? -1 : 0;
}

/* New reference: which call of d->key this is, counted in the mode. */
static PyObject *next_index(gck_dispatch *d)
{
    PyObject *counter = PyObject_GetAttrString(d->self, "func_counter");
    PyObject *index = counter != NULL ? PyDict_GetItemWithError(counter, d->key) : NULL, *next = NULL;

    if (counter != NULL && index == NULL && !PyErr_Occurred()) {
        index = PyLong_FromLong(0);
    } else {
        Py_XINCREF(index);
    }
    if (index != NULL) {
        next = PyLong_FromLongLong(PyLong_AsLongLong(index) + 1);
    }
    if (next == NULL || PyDict_SetItem(counter, d->key, next) < 0) {
        Py_CLEAR(index);
    }
    Py_XDECREF(counter);
    Py_XDECREF(next);
    return index;
}

static PyObject *replay_answer(gck_dispatch *d, int *again)
{
    PyObject *index = next_index(d);
    PyObject *calls = index != NULL ? calls_of(d, 0) : NULL;
    PyObject *out = NULL;
    const gck_call call = {d->key, d->args, d->kwargs, NULL, NULL};

    PyObject *modes;
    if (index != NULL && !PyErr_Occurred() && gck_hide_begin(d->store->state, &modes) == 0) {
        out = gck_store_replay(d->store, &call, d->key, calls, index, 0, again);
        if (gck_hide_end(d->store->state, modes) < 0) {
            Py_CLEAR(out);
            *again = 0;
        }
    }
    Py_XDECREF(index);
    return out;
}

static PyObject *run_call(const gck_call *call) { return PyObject_Call(call->with, call->args, call->kwargs); }

static PyObject *replay(gck_dispatch *d)
{
    const int i = named(d);
    const gck_call call = {d->key, d->args, d->kwargs, run_call, d->call};
    int again = i == -1;
    PyObject *out = i >= 0 ? gck_replay_call(d->store, i, d->store->lines[i].next++, &call) : i == -2 ? replay_answer(d, &again) : NULL;

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

/* One operator: as torch's mode of that name while somebody traces, else by `work`. */
static PyObject *dispatch(PyObject *self, PyObject *all, const char *mode, PyObject *(*work)(gck_dispatch *))
{
    gck_dispatch d;
    PyObject *out = NULL;
    int status = dispatch_begin(self, all, &d);

    if (status == 0) {
        status = is_traced(&d);
    }
    if (status > 0) {
        out = as_torch(&d, mode);
    } else if (status == 0 && (status = PySet_Contains(d.store->state->py.ignored_ops, d.func)) >= 0
               && identify(&d) == 0) {
        out = status ? PyObject_Call(d.call, d.args, d.kwargs) : work(&d);
    }
    dispatch_end(&d);
    return out;
}

static PyObject *dispatch_forward(PyObject *self, PyObject *all) { return dispatch(self, all, "forward", record); }

static PyObject *dispatch_recompute(PyObject *self, PyObject *all) { return dispatch(self, all, "recompute", replay); }

/* ---- with context: ---- */

/* 1: by key; 0: a mode, where somebody traces and where somebody's mode watches; -1. */
static int may_use_key(const gck_py *py, PyObject *self)
{
    PyObject *by_key = PyObject_GetAttrString(self, "_by_key");
    const int wanted = by_key == NULL ? -1 : by_key == Py_True;
    const int modes = wanted > 0 ? gck_ask(py->dispatch_stack_len) : 0;
    const int compiling = wanted > 0 && modes == 0 ? gck_ask(py->is_compiling) : 0;

    Py_XDECREF(by_key);
    return wanted < 0 || modes < 0 || compiling < 0 ? -1 : wanted && !modes && !compiling;
}

/* In C, so that no signal handler runs between the key and the with statement. */
static PyObject *context_enter(PyObject *self, PyObject *unused)
{
    gck_store *store = (gck_store *)PyObject_GetAttrString(self, "_store");
    PyObject *replay = store != NULL ? PyObject_GetAttrString(self, "_replay") : NULL, *result = NULL;
    const int by_key = replay != NULL ? may_use_key(&store->state->py, self) : -1;
    gck_active *active = NULL;

    (void)unused;
    if (by_key < 0 || (replay == Py_False && gck_region_decides(store->state, 0, &store) < 0)) {
        goto exit;
    }
    if ((active = malloc(sizeof *active)) == NULL) {
        PyErr_NoMemory();
    } else if (gck_selective_begin(store->state, active, store, replay == Py_True, by_key) < 0) {
        free(active);
    } else {
        active->context = self;
        if (!by_key && replay == Py_True) {
            gck_store_rewind(store);
        }
        result = by_key ? Py_NewRef(self) : PyObject_CallMethod(self, "enter_mode", NULL);
        if (result == NULL) {
            gck_selective_end(store->state, active);
            free(active);
        }
    }

exit:
    Py_XDECREF((PyObject *)store);
    Py_XDECREF(replay);
    return result;
}

static PyObject *context_exit(PyObject *self, PyObject *error)
{
    gck_store *store = (gck_store *)PyObject_GetAttrString(self, "_store");
    gck_active *active = store != NULL ? gck_active_of(store->state, self) : NULL;
    PyObject *method, *result;

    const int by_key = active != NULL && active->by_key;

    if (active != NULL) {
        gck_selective_end(store->state, active);
        free(active);
    }
    if (by_key) {
        result = Py_NewRef(Py_None);
    } else {
        method = store != NULL ? PyObject_GetAttrString(self, "exit_mode") : NULL;
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

/* ---- the classes ---- */

static PyMethodDef enter_def = {"__enter__", context_enter, METH_NOARGS, NULL};
static PyMethodDef exit_def = {"__exit__", context_exit, METH_VARARGS, NULL};
static PyMethodDef forward_def = {"__torch_dispatch__", dispatch_forward, METH_VARARGS, NULL};
static PyMethodDef recompute_def = {"__torch_dispatch__", dispatch_recompute, METH_VARARGS, NULL};

static int add_method(PyTypeObject *class, PyMethodDef *def)
{
    PyObject *method = PyDescr_NewMethod(class, def);
    const int status = method != NULL ? PyObject_SetAttrString((PyObject *)class, def->ml_name, method) : -1;

    Py_XDECREF(method);
    return status;
}

/* add_dispatch(class of the forward's mode, class of the recompute's): gives them their methods. */
PyObject *gck_add_dispatch(PyObject *module, PyObject *args)
{
    PyMethodDef *defs[2] = {&forward_def, &recompute_def};
    PyTypeObject *classes[2];

    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!:add_dispatch", &PyType_Type, &classes[0], &PyType_Type, &classes[1])) {
        return NULL;
    }
    for (int i = 0; i < 2; i++) {
        if (add_method(classes[i], defs[i]) < 0 || add_method(classes[i], &enter_def) < 0
            || add_method(classes[i], &exit_def) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}
