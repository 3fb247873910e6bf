/* selective.c: operators caught while a region runs.
 *
 * Named operators are caught on torch's dispatch key `Negative`, below autograd and above the
 * key of dispatch modes.  torch's own fallback there does nothing to tensors whose negation is
 * not pending, so a thread that includes the key runs as before, and our kernels for the named
 * operators are called.  Where a mode of others is active when a region begins, one of ours
 * is put on top of it (mode.c), as for policies that are functions and must see everything. */
#include "selective.h"
#include "stand_in.h"

#include <stdlib.h>

/* ---- who catches in this thread ---- */

static gck_active *next_here(gck_active *a, unsigned long thread)
{
    while (a != NULL && (a->thread != thread || a->busy)) {
        a = a->outer;
    }
    return a;
}

/* Switches the key for this thread; an exception that is pending survives.  0 or -1. */
static int set_key(const gck_py *py, int on)
{
    gck_error error = gck_error_take();

    Py_XDECREF(PyObject_CallFunctionObjArgs(py->set_included, py->key, on ? Py_True : Py_False, NULL));
    return gck_error_return(&error);
}

int gck_selective_begin(gck_state *state, gck_active *active, gck_store *store, int replay, int by_key)
{
    /* Counted here, not in the store: two threads may recompute one region at once. */
    int64_t *next = replay ? calloc((size_t)gck_store_nlines(store) + 1, sizeof *next) : NULL;

    if (replay && next == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *active = (gck_active){
        .store = (gck_store *)Py_NewRef((PyObject *)store),
        .replay = replay,
        .thread = PyThread_get_thread_ident(),
        .by_key = by_key,
        .busy = !by_key,
        .next = next,
        .outer = state->active,
    };
    state->active = active;
    if (gck_announce(state, active) < 0 || (by_key && set_key(&state->py, 1) < 0)) {
        gck_selective_end(state, active);
        return -1;
    }
    return 0;
}

void gck_selective_end(gck_state *state, gck_active *active)
{
    gck_active **link = &state->active;

    while (*link != NULL && *link != active) {
        link = &(*link)->outer;
    }
    if (*link == active) {
        *link = active->outer;
    }
    if (active->by_key && next_here(state->active, active->thread) == NULL) {
        set_key(&state->py, 0);
    }
    if (active->decides) {
        gck_stand_in(state, -1);
    }
    gck_error error = gck_error_take();
    free(active->next);
    active->next = NULL;
    Py_CLEAR(active->store);
    gck_error_return(&error);
}

gck_active *gck_active_of(gck_state *state, const PyObject *context)
{
    const unsigned long thread = PyThread_get_thread_ident();
    gck_active *a = state->active;

    while (a != NULL && (a->thread != thread || a->context != context)) {
        a = a->outer;
    }
    return a;
}

/* ---- named operators ---- */

/* A cast to a floating dtype and nothing else is nobody's, and operators make one of every number they are given
 * (which arrives as that number): done in half the time that the operator itself takes from here.  NULL without
 * an exception: it is more than that. */
static PyObject *plain_cast(const gck_py *py, PyObject *op, PyObject *args, PyObject *kwargs)
{
    PyObject *x = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    PyObject *dtype, *all, *to, *options, *out = NULL;

    if (op != py->cast || kwargs == NULL || PyDict_Size(kwargs) != 1 || x == NULL
        || (dtype = PyDict_GetItem(kwargs, py->names.dtype)) == NULL
        || (dtype != py->float32 && dtype != py->bfloat16 && dtype != py->float16)) {
        return NULL;
    }
    if (PyFloat_Check(x)) {
        options = Py_BuildValue("{OOOO}", py->names.dtype, dtype, py->names.device, py->names.cpu);
        out = options != NULL ? PyObject_Call(py->scalar_tensor, args, options) : NULL;
        Py_XDECREF(options);
    } else if ((PyObject *)Py_TYPE(x) == py->Tensor) {
        to = PyObject_GetAttr(x, py->names.to);
        all = to != NULL ? PyTuple_Pack(3, dtype, Py_False, Py_True) : NULL;   /* non_blocking, copy */
        out = all != NULL ? PyObject_Call(to, all, NULL) : NULL;
        Py_XDECREF(to);
        Py_XDECREF(all);
    }
    return out;
}

/* The operator itself, below us: seen by those around `hit` only (NULL: by nobody). */
static PyObject *call_below(gck_state *state, gck_active *hit, unsigned long thread, PyObject *op, PyObject *call,
                            PyObject *args, PyObject *kwargs)
{
    PyObject *out;
    gck_active *a;

    for (a = state->active; a != NULL; a = a->outer) {
        a->busy += a->thread == thread;
        if (a == hit) {
            break;
        }
    }
    const int alone = next_here(state->active, thread) == NULL;
    out = alone && set_key(&state->py, 0) < 0 ? NULL : alone && hit == NULL ? plain_cast(&state->py, op, args, kwargs) : NULL;
    if (out == NULL && !PyErr_Occurred()) {
        out = PyObject_Call(call, args, kwargs);
    }
    for (a = state->active; a != NULL; a = a->outer) {
        a->busy -= a->thread == thread && a->busy > 0;
        if (a == hit) {
            break;
        }
    }
    if (alone && set_key(&state->py, 1) < 0) {
        Py_CLEAR(out);
    }
    return out;
}

/* What runs a caught operator: below `hit`. */
typedef struct {
    gck_state  *state;
    gck_active *hit;
    PyObject   *call;
} below;

static PyObject *run_below(const gck_call *call)
{
    const below *with = call->with;

    return call_below(with->state, with->hit, PyThread_get_thread_ident(), call->op, with->call, call->args, call->kwargs);
}

static void count_busy(gck_state *state, int by)
{
    const unsigned long thread = PyThread_get_thread_ident();

    for (gck_active *a = state->active; a != NULL; a = a->outer) {
        a->busy += a->thread == thread ? by : 0;
    }
}

int gck_hide_begin(gck_state *state, PyObject **modes)
{
    const int any = gck_ask(state->py.dispatch_stack_len), tracing = any > 0 ? gck_tracing(&state->py) : 0;
    const int active = any < 0 || tracing < 0 ? -1 : any && !tracing;    /* what is traced needs its modes */

    *modes = active > 0 ? PyObject_CallMethod(state->py.selection, "without_modes", NULL) : NULL;
    if (active < 0 || (active > 0 && *modes == NULL)) {
        return -1;
    }
    count_busy(state, 1);
    return 0;
}

int gck_hide_end(gck_state *state, PyObject *modes)
{
    PyObject *type, *value, *traceback, *done = NULL;

    count_busy(state, -1);
    if (modes == NULL) {
        return 0;
    }
    PyErr_Fetch(&type, &value, &traceback);
    done = PyObject_CallMethod(modes, "close", NULL);
    Py_DECREF(modes);
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Are the outputs of the next call of the operator i to be kept? */
static int wanted(gck_store *store, int i)
{
    const gck_named *named = gck_store_named(store, i);

    if (store->policy == NULL || i >= store->policy->n) {
        return 1;                                /* every decision is */
    }
    const int64_t call = store->counters[named->group]++;
    return named->keep != GCK_RECOMPUTE && (named->every <= 1 || call % named->every == named->phase);
}

static int decides(const gck_named *named) { return named->keep >= GCK_DECIDE && named->keep != GCK_NAMED; }

/* Keep of a call's outputs what is wanted.  0 or -1. */
static int keep_outputs(gck_store *store, int i, const gck_call *call, gck_draw *draw, PyObject *out)
{
    const gck_named *named = gck_store_named(store, i);
    gck_line *line = &store->lines[i];
    PyObject *index;
    int status;

    if (line->calls == NULL
        && ((line->calls = PyDict_New()) == NULL || PyDict_SetItem(store->storage, named->op, line->calls) < 0)) {
        return -1;
    }
    if ((index = PyLong_FromLongLong(line->next++)) == NULL) {
        return -1;
    }
    status = !wanted(store, i) ? gck_store_skip(store, line->calls, index)
           : named->keep == GCK_SAVE ? gck_store_keep(store, line->calls, index, out, &named->plan)
           : named->keep == GCK_NAMED ? gck_store_candidate(store, i, index, out)
                                      : gck_store_decide(store, line->calls, index, call, named->form, out);
    if (status == 0 && decides(named)) {
        status = gck_store_tell(store, named->op, index, call);
    }
    if (status == 0 && named->draws) {
        status = gck_store_drew(store, named->op, index, draw);
    }
    Py_DECREF(index);
    return status;
}

PyObject *gck_record_call(gck_store *store, int i, const gck_call *call)
{
    gck_state *state = store->state;
    gck_draw draw = {NULL, NULL};
    PyObject *out = NULL, *modes;

    if (!gck_store_named(store, i)->draws || gck_draw_begin(&state->py, call->args, call->kwargs, &draw) == 0) {
        out = call->run(call);
    }
    if (out != NULL && gck_hide_begin(state, &modes) < 0) {
        Py_CLEAR(out);
    } else if (out != NULL) {
        const int status = keep_outputs(store, i, call, &draw, out);
        if (gck_hide_end(state, modes) < 0 || status < 0) {
            Py_CLEAR(out);
        }
    }
    gck_draw_clear(&draw);
    return out;
}

PyObject *gck_replay_call(gck_store *store, int i, int64_t *next, const gck_call *call)
{
    const gck_named *named = gck_store_named(store, i);
    PyObject *index = PyLong_FromLongLong(*next), *out = NULL, *modes;
    int again = 0;
    const int same = index == NULL ? -1 : store->by_call && decides(named)
        ? gck_store_is_told(store, named->op, index, call, 0) : 1;

    if (same == 0) {                             /* the forward decided nothing here */
        Py_DECREF(index);
        return call->run(call);
    }
    *next += same > 0;
    if (same < 0 || gck_hide_begin(store->state, &modes) < 0) {
        Py_XDECREF(index);
        return NULL;
    }
    out = gck_store_replay(store, call, named->op, store->lines[i].calls, index,
                           store->policy == NULL || i >= store->policy->n, &again);
    Py_DECREF(index);
    if (gck_hide_end(store->state, modes) < 0) {
        Py_CLEAR(out);
        return NULL;
    }
    return again ? call->run(call) : out;
}

/* A fake tensor, also in a list, when its mode has stepped aside to compute a shape. */
static int fake_among(const gck_py *py, PyObject *args)
{
    const Py_ssize_t n = PyTuple_Check(args) || PyList_Check(args) ? PySequence_Size(args) : 0;
    int found = (PyObject *)Py_TYPE(args) == py->FakeTensor;

    for (Py_ssize_t i = 0; !found && i < n; i++) {
        found = fake_among(py, PyTuple_Check(args) ? PyTuple_GetItem(args, i) : PyList_GetItem(args, i));
    }
    return found;
}

/* Does this thread compile something? */
static int compiling(const gck_py *py)
{
    PyObject *context = PyObject_GetAttrString(py->guards, "tracing_context");
    const int truth = context != NULL && context != Py_None;

    gck_error_report();                          /* no such attribute: it never did */
    Py_XDECREF(context);
    return truth;
}

/* An operator that is nobody's: one that we call, or a torch.func transform, which calls it again on the level below
 * with the key as it was.  Where the key is off a negation is pending, which torch's fallback would do in our place. */
static PyObject *pass_on(gck_state *state, PyObject *call, PyObject *args, PyObject *kwargs)
{
    PyObject *on = PyObject_CallFunctionObjArgs(state->py.is_included, state->py.key, NULL);
    PyObject *out = NULL;

    if (on == Py_False) {
        out = PyObject_CallMethod(state->py.selection, "call_negated", "OOO", call, args, kwargs ? kwargs : Py_None);
    } else if (on != NULL && set_key(&state->py, 0) == 0) {
        out = PyObject_Call(call, args, kwargs);
        if (set_key(&state->py, 1) < 0) {
            Py_CLEAR(out);
        }
    }
    Py_XDECREF(on);
    return out;
}

/* The kernel of a named operator; self is (module, operator, what calls it). */
static PyObject *caught(PyObject *self, PyObject *args, PyObject *kwargs)
{
    gck_state *state = gck_state_of(PyTuple_GetItem(self, 0));
    PyObject *op = PyTuple_GetItem(self, 1), *call = PyTuple_GetItem(self, 2), *out;
    const unsigned long thread = PyThread_get_thread_ident();
    gck_active *hit = next_here(state->active, thread);
    int i = -1;
    const int functorch = hit == NULL ? 0 : gck_functorch_active(&state->py);

    if (functorch < 0) {
        return NULL;
    }
    if (hit == NULL || functorch) {
        return pass_on(state, call, args, kwargs);
    }
    while (hit != NULL && (i = gck_store_find(hit->store, op, args, kwargs)) < 0) {
        hit = next_here(hit->outer, thread);
    }
    const int tracing = hit == NULL ? 0 : fake_among(&state->py, args) || compiling(&state->py) ? 1 : gck_tracing(&state->py);
    if (tracing < 0) {
        return NULL;
    }
    if (hit == NULL || tracing) {                /* no store names it; or a block is compiled inside the region: that is no call */
        return call_below(state, NULL, thread, op, call, args, kwargs);
    }
    /* A mode that was entered inside comes first, as under torch's modes: what is replayed would not reach it. */
    const int modes = hit->replay ? gck_ask(state->py.dispatch_stack_len) : 0;
    if (modes != 0) {
        return modes < 0 ? NULL : PyObject_CallMethod(state->py.selection, "through_modes", "OOOO", state->py.key, call, args,
                                                       kwargs ? kwargs : Py_None);
    }
    gck_store *store = (gck_store *)Py_NewRef((PyObject *)hit->store);
    below with = {state, hit, call};
    const gck_call here = {op, args, kwargs, run_below, &with};
    out = hit->replay ? gck_replay_call(store, i, &hit->next[i], &here) : gck_record_call(store, i, &here);
    Py_DECREF((PyObject *)store);
    return out;
}

static PyMethodDef caught_def = {"caught", (PyCFunction)(void (*)(void))caught, METH_VARARGS | METH_KEYWORDS, NULL};

PyObject *gck_catcher(PyObject *module, PyObject *op)
{
    PyObject *call = PyObject_GetAttrString(op, "_op");
    PyObject *self = call != NULL ? PyTuple_Pack(3, module, op, call) : NULL;
    PyObject *function = self != NULL ? PyCFunction_New(&caught_def, self) : NULL;

    Py_XDECREF(call);
    Py_XDECREF(self);
    return function;
}

/* gradckpt._C.selective_name(x, name, modes): in regions that catch by key, and in those of these modes that are ours. */
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
        if (PyObject_TypeCheck(mode, state->Context) && gck_context_name(mode, x, name) < 0) {
            return NULL;
        }
    }
    for (gck_active *a = next_here(state->active, thread); a != NULL; a = next_here(a->outer, thread)) {
        if (!a->replay && gck_store_name(a->store, x, name) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* ---- around a region ---- */

int gck_catch_begin(gck_state *state, gck_catch *c, gck_store *store, PyObject *policy_fn, int replay)
{
    int modes;
    PyObject *entered;

    c->mode = NULL;
    c->by_key = 0;
    if (store == NULL || (modes = gck_ask(state->py.dispatch_stack_len)) < 0) {
        return store == NULL ? 0 : -1;
    }
    if (policy_fn == NULL && !modes && gck_catches_by_key(state, store)) {
        c->by_key = gck_selective_begin(state, &c->active, store, replay, 1) == 0;
        return c->by_key ? 0 : -1;
    }
    c->mode = PyObject_CallMethod(state->py.selection, "selective_mode", "OOi", (PyObject *)store,
                                  policy_fn != NULL ? policy_fn : Py_None, replay);
    entered = c->mode != NULL ? PyObject_CallMethod(c->mode, "__enter__", NULL) : NULL;
    if (entered == NULL) {
        Py_CLEAR(c->mode);
        return -1;
    }
    Py_DECREF(entered);
    return 0;
}

/* An exception that is pending survives. */
int gck_catch_end(gck_state *state, gck_catch *c)
{
    gck_error error;

    if (c->by_key) {
        gck_store *store = c->active.replay || PyErr_Occurred() ? NULL
                         : (gck_store *)Py_NewRef((PyObject *)c->active.store);
        gck_selective_end(state, &c->active);
        const int status = store != NULL ? gck_store_finish(store) : 0;
        Py_XDECREF((PyObject *)store);
        return status;
    }
    if (c->mode == NULL) {
        return 0;
    }
    error = gck_error_take();
    Py_XDECREF(PyObject_CallMethod(c->mode, "__exit__", "OOO", Py_None, Py_None, Py_None));
    gck_error_keep(&error);
    Py_CLEAR(c->mode);
    return gck_error_return(&error);
}

int gck_catches_by_key(const gck_state *state, const gck_store *store)
{
    return state->py.key != Py_None && !state->by_mode && !store->traced;
}

PyObject *gck_catch_by_mode(PyObject *module, PyObject *on)
{
    const int truth = PyObject_IsTrue(on);

    if (truth < 0) {
        return NULL;
    }
    gck_state_of(module)->by_mode = truth;
    Py_RETURN_NONE;
}

PyObject *gck_selective_key(PyObject *module, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(gck_state_of(module)->py.key);
}
