/* selective.c: operators caught while a region runs.
 *
 * Named operators are caught on torch's dispatch key `Negative`, below autograd and above the key
 * of dispatch modes.  torch's own fallback there does nothing to tensors without a pending
 * negation.  So a thread that includes the key runs as before, and our kernels for the named
 * operators are called.  Where another mode is active when a region begins, one of ours is put on
 * top of it (selective_mode.c), as for policies that are functions and must see every operator. */
#include "engine/selective/selective.h"

#include "torch/calls.h"
#include "torch/draws.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/checkpoint_options.h"
#include "engine/selective/checkpoint_replacement.h"
#include "engine/selective/op_labels.h"
#include "engine/selective/op_outputs.h"
#include "engine/selective/op_policy.h"
#include "engine/selective/replay_discrete.h"

#include <stdlib.h>

/* ---- who catches in this thread ---- */

/* Switch the key for this thread; a pending exception survives.  0 or -1. */
static int set_key(const gck_py *py, int on)
{
    gck_error error = gck_error_take();

    gck_done(PyObject_CallFunctionObjArgs(py->set_included, py->key, on ? Py_True : Py_False, NULL));
    return gck_error_return(&error);
}

/* 1 when a store of this thread needs the key, one that is hidden for the moment too. */
static int catches_by_key(const gck_active *a, unsigned long thread)
{
    while (a != NULL && (a->thread != thread || !a->by_key || (a->busy && !a->hidden))) {
        a = a->outer;
    }
    return a != NULL;
}

int gck_selective_begin(gck_state *state, gck_active *active, gck_op_storage *store, int replay, int by_key)
{
    /* Counted here, not in the store: two threads may recompute one region at once. */
    int64_t *next = replay ? calloc((size_t)gck_op_storage_nlines(store) + 1, sizeof *next) : NULL;

    if (replay && next == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *active = (gck_active){
        .store = (gck_op_storage *)Py_NewRef((PyObject *)store),
        .replay = replay,
        .thread = PyThread_get_thread_ident(),
        .by_key = by_key,
        .busy = !by_key,
        .next = next,
        .outer = state->active,
    };
    state->active = active;
    if (replay && !by_key) {
        active->counts = PyObject_CallFunctionObjArgs(state->py.defaultdict, state->py.count, NULL);
    }
    if ((replay && !by_key && active->counts == NULL) || gck_replay_discrete_announce(state, active) < 0
        || (by_key && set_key(&state->py, 1) < 0)) {
        gck_selective_end(state, active);
        return -1;
    }
    return 0;
}

void gck_selective_end(gck_state *state, gck_active *active)
{
    gck_active **link = &state->active;
    gck_error error = gck_error_take();

    while (*link != NULL && *link != active) {
        link = &(*link)->outer;
    }
    if (*link == active) {
        *link = active->outer;
    }
    if (active->by_key && !catches_by_key(state->active, active->thread)) {
        set_key(&state->py, 0);
    }
    if (active->decides) {
        gck_replace_checkpoint(state, -1);
    }
    free(active->next);
    active->next = NULL;
    Py_CLEAR(active->store);
    Py_CLEAR(active->counts);
    if (PyErr_Occurred()) {                      /* the exception cannot be returned from here */
        PyErr_WriteUnraisable(NULL);
    }
    gck_error_return(&error);
}

/* ---- named operators ---- */

/* Fast path: a pure float cast is not discrete, and kernels cast each Python scalar (it arrives as
 * that number).  This takes half the time of the operator itself.  NULL without an exception: the
 * call is more than a cast. */
static PyObject *plain_cast(const gck_py *py, PyObject *op, PyObject *args, PyObject *kwargs)
{
    PyObject *x = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    PyObject *dtype, *options, *out = NULL;

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
        out = PyObject_CallMethodObjArgs(x, py->names.to, dtype, Py_False, Py_True, NULL);     /* non_blocking, copy */
    }
    return out;
}

/* Make the active stores of this thread, from the innermost up to `last` (NULL: all), see more or
 * fewer operators. */
static void count_busy(gck_state *state, const gck_active *last, int by)
{
    const unsigned long thread = PyThread_get_thread_ident();

    for (gck_active *a = state->active; a != NULL; a = a == last ? NULL : a->outer) {
        a->busy += a->thread == thread && a->busy + by >= 0 ? by : 0;
    }
}

/* Call the operator itself, below `hit`: only stores around `hit` see it (NULL: none). */
static PyObject *call_below(gck_state *state, gck_active *hit, PyObject *op, PyObject *call, PyObject *args,
                            PyObject *kwargs)
{
    PyObject *out = NULL;

    count_busy(state, hit, 1);
    const int alone = gck_active_here(state->active, PyThread_get_thread_ident()) == NULL;
    if (alone && set_key(&state->py, 0) == 0 && hit == NULL) {
        out = plain_cast(&state->py, op, args, kwargs);
    }
    if (out == NULL && !PyErr_Occurred()) {
        out = PyObject_Call(call, args, kwargs);
    }
    count_busy(state, hit, -1);
    if (alone && set_key(&state->py, 1) < 0) {
        Py_CLEAR(out);
    }
    return out;
}

/* Runs a caught operator, below `hit`. */
typedef struct {
    gck_state  *state;
    gck_active *hit;
    PyObject   *call;
} below;

static PyObject *run_below(const gck_call *call)
{
    const below *with = call->with;

    return call_below(with->state, with->hit, call->op, with->call, call->args, call->kwargs);
}

/* Hide operators that we call to keep or return an output from every region of this thread and from
 * every mode.  0, or -1 with the first exception. */
static int hide_begin(gck_state *state, PyObject **modes)
{
    const int any = gck_modes_that_watch(&state->py), tracing = any > 0 ? gck_tracing(&state->py) : 0;
    const int active = any < 0 || tracing < 0 ? -1 : any && !tracing;    /* tracing needs its modes */

    *modes = active > 0 ? PyObject_CallFunction(state->py.call.without_modes, NULL) : NULL;
    if (active < 0 || (active > 0 && *modes == NULL)) {
        return -1;
    }
    count_busy(state, NULL, 1);
    return 0;
}

static int hide_end(gck_state *state, PyObject *modes)
{
    count_busy(state, NULL, -1);
    if (modes == NULL) {
        return 0;
    }
    gck_error error = gck_error_take();
    gck_done(PyObject_CallMethod(modes, "close", NULL));
    Py_DECREF(modes);
    return gck_error_return(&error);
}

/* Are the outputs of this call to be kept? */
static int wanted(gck_op_storage *store, int line)
{
    const gck_op_rule *named = gck_op_storage_rule(store, line);

    if (store->policy == NULL || line >= store->policy->n) {
        return 1;                                /* every discrete output is kept */
    }
    const int64_t call = store->counters[named->group]++;
    return named->keep != GCK_OP_RECOMPUTE && (named->every <= 1 || call % named->every == named->phase);
}

static int decides(const gck_op_rule *named) { return named->keep >= GCK_OP_REPLAY && named->keep != GCK_OP_LABEL; }

/* The same for a policy that is a function, 1, 0 or -1.  *rule: what happens to the outputs: `own`,
 * filled in, or that of a discrete operator. */
static int ask(gck_op_storage *store, const gck_call *call, PyObject *out, gck_op_rule *own, const gck_op_rule **rule)
{
    gck_state *state = store->state;
    PyObject *compress = PyObject_CallFunction(state->py.call.ask, "OOOOO", call->context, call->op, call->args,
                                             call->kwargs != NULL ? call->kwargs : Py_None, out);
    int keep = compress == NULL ? -1 : compress != Py_False;

    own->keep = GCK_OP_SAVE;
    if (keep > 0
        && (gck_options_plan(state, compress, &own->plan) < 0
            || (own->plan.codec != NULL && own->plan.replay_discrete > store->replay_discrete
                && gck_replay_discrete_from(state, store, own->plan.replay_discrete) < 0))) {
        keep = -1;
    }
    Py_XDECREF(compress);
    const gck_op_rule *discrete_rules = keep >= 0 ? gck_op_storage_discrete_rule(store, call) : NULL;
    const int decide = discrete_rules != NULL && (keep == 0 || discrete_rules->keep == GCK_OP_REPLAY_CHOICE);
    *rule = decide ? discrete_rules : own;
    return decide ? 1 : keep;
}

/* Keep those of a call's outputs that the policy names.  The call counts as one that runs again
 * until they are stored, because the policy and the code that stores them may call operators too.
 * 0 or -1. */
static int keep_outputs(gck_op_storage *store, int line, const gck_call *call, gck_draw *draw, PyObject *out)
{
    gck_op_rule own = {.op = NULL};
    const gck_op_rule *rule = line >= 0 ? gck_op_storage_rule(store, line) : NULL;
    PyObject *modes;
    int keep = PyDict_SetItem(call->calls, call->index, store->state->py.recompute_mark), status;

    if (keep == 0) {
        keep = line >= 0 ? wanted(store, line) : ask(store, call, out, &own, &rule);
    }
    if (keep <= 0 || hide_begin(store->state, &modes) < 0) {
        return keep == 0 ? 0 : -1;
    }
    if (rule->keep == GCK_OP_SAVE) {
        status = gck_op_output_keep(store, call, out, &rule->plan);
    } else if (rule->keep == GCK_OP_LABEL) {
        status = gck_op_label_candidate(store, line, call, out);
    } else {
        status = gck_op_output_keep_discrete(store, call, rule->form, out);
    }
    if (status == 0 && decides(rule)) {
        status = gck_op_output_note_call(store, call);
    }
    if (status == 0 && draw->before != NULL) {
        status = gck_op_output_note_draw(store, call, draw);
    }
    return hide_end(store->state, modes) < 0 ? -1 : status;
}

PyObject *gck_record_call(gck_op_storage *store, int line, gck_call *call)
{
    gck_py *py = &store->state->py;
    gck_draw draw = {NULL, NULL};
    const int draws = line >= 0 ? gck_op_storage_rule(store, line)->draws : gck_op_draws(py, call->op);
    PyObject *out = draws < 0 || (draws && gck_draw_begin(py, call->args, call->kwargs, &draw) < 0) ? NULL
                  : call->run(call);

    call->calls = out != NULL ? gck_op_storage_calls(store, line, call, 1) : NULL;
    call->index = call->calls != NULL ? PyLong_FromSsize_t(PyDict_Size(call->calls)) : NULL;
    if (call->index == NULL || keep_outputs(store, line, call, &draw, out) < 0) {
        Py_CLEAR(out);
    }
    Py_XDECREF(call->calls);
    Py_XDECREF(call->index);
    gck_draw_clear(&draw);
    return out;
}

/* New reference: the number of this call among those of its operator. */
static PyObject *next_index(gck_active *active, int line, PyObject *key)
{
    PyObject *counts, *count, *index;

    if (line >= 0) {
        return PyLong_FromLongLong(active->next[line]++);
    }
    counts = Py_NewRef(active->counts);          /* a hash may be Python */
    count = PyObject_GetItem(counts, key);
    index = count != NULL ? PyIter_Next(count) : NULL;
    Py_DECREF(counts);
    Py_XDECREF(count);
    return index;
}

/* New reference: what the forward has kept of a call; NULL with *again and no exception: it runs
 * again. */
static PyObject *find_entry(gck_op_storage *store, int lasting, const gck_call *call, int *again)
{
    const gck_py *py = &store->state->py;
    PyObject *entry = call->calls != NULL ? PyDict_GetItemWithError(call->calls, call->index) : NULL;

    /* Without grad the call dispatches differently: the forward kept no discrete output there. */
    *again = !PyErr_Occurred() && (entry == py->recompute_mark || (call->calls == NULL && lasting));
    if (*again || PyErr_Occurred()) {
        return NULL;
    }
    return entry != NULL && entry != py->consumed_mark ? Py_NewRef(entry)
         : PyObject_CallFunction(py->call.raise_no_entry, "OOii", call->key, call->index, call->calls != NULL,
                               entry != NULL);
}

PyObject *gck_replay_call(gck_active *active, int line, gck_call *call)
{
    gck_op_storage *store = active->store;
    const int lasting = line >= 0 && (store->policy == NULL || line >= store->policy->n);
    const int told = line == GCK_LINE_BY_KEY || (store->by_call && decides(gck_op_storage_rule(store, line)));
    PyObject *out = NULL, *entry = NULL, *modes;
    int again = 0, same = -1;

    call->index = next_index(active, line, call->key);
    call->calls = call->index != NULL ? gck_op_storage_calls(store, line, call, 0) : NULL;
    if (call->index != NULL && !PyErr_Occurred()) {
        same = told ? gck_op_output_is_of_call(store, call, line == GCK_LINE_BY_KEY) : 1;
    }
    if (same > 0) {
        entry = find_entry(store, lasting, call, &again);
    } else if (same == 0) {                      /* not discrete in the forward */
        again = 1;
        if (line >= 0) {
            active->next[line]--;
        }
    }
    if (entry != NULL && hide_begin(store->state, &modes) == 0) {
        out = gck_op_output_give(store, call, entry, lasting);
        if (hide_end(store->state, modes) < 0) {
            Py_CLEAR(out);
        }
    }
    Py_XDECREF(entry);
    Py_XDECREF(call->calls);
    Py_XDECREF(call->index);
    return again ? call->run(call) : out;
}

/* 1 when a fake tensor is among the arguments, also in a list, whose mode has stepped aside to
 * compute a shape. */
static int fake_among(const gck_py *py, PyObject *args)
{
    const Py_ssize_t n = PyTuple_Check(args) || PyList_Check(args) ? PySequence_Size(args) : 0;
    int found = (PyObject *)Py_TYPE(args) == py->FakeTensor;

    for (Py_ssize_t i = 0; !found && i < n; i++) {
        found = fake_among(py, PyTuple_Check(args) ? PyTuple_GetItem(args, i) : PyList_GetItem(args, i));
    }
    return found;
}

/* 1 while this thread compiles something. */
static int compiling(const gck_py *py)
{
    PyObject *context = PyObject_GetAttrString(py->guards, "tracing_context");
    const int truth = context != NULL && context != Py_None;

    gck_error_report();                          /* no such attribute: it never did */
    Py_XDECREF(context);
    return truth;
}

/* Run an operator that belongs to no store: one that we call, or one inside a torch.func transform,
 * which calls it again on the level below with the key as it was.  Where the key is off a negation
 * is pending, which torch's fallback would resolve here. */
static PyObject *pass_on(gck_state *state, PyObject *call, PyObject *args, PyObject *kwargs)
{
    const int on = gck_is_true(PyObject_CallFunctionObjArgs(state->py.is_included, state->py.key, NULL));
    PyObject *out = NULL;

    if (on == 0) {
        out = PyObject_CallFunction(state->py.call.call_negated, "OOO", call, args, kwargs ? kwargs : Py_None);
    } else if (on > 0 && set_key(&state->py, 0) == 0) {
        out = PyObject_Call(call, args, kwargs);
        if (set_key(&state->py, 1) < 0) {
            Py_CLEAR(out);
        }
    }
    return out;
}

/* The kernel of a named operator; self is (module, operator, what calls it). */
static PyObject *caught(PyObject *self, PyObject *args, PyObject *kwargs)
{
    gck_state *state = gck_state_of(PyTuple_GetItem(self, 0));
    PyObject *op = PyTuple_GetItem(self, 1), *call = PyTuple_GetItem(self, 2), *out;
    const unsigned long thread = PyThread_get_thread_ident();
    gck_active *hit = gck_active_here(state->active, thread);
    below with = {.state = state, .call = call};
    gck_call here = {.op = op, .key = op, .args = args, .kwargs = kwargs, .run = run_below, .with = &with};
    int line = GCK_LINE_NONE;
    const int functorch = hit == NULL ? 0 : gck_functorch_active(&state->py);

    if (functorch < 0) {
        return NULL;
    }
    if (hit == NULL || functorch) {
        return pass_on(state, call, args, kwargs);
    }
    while (hit != NULL && (line = gck_op_storage_find(hit->store, &here)) < 0) {
        hit = gck_active_here(hit->outer, thread);
    }
    const int tracing = hit == NULL ? 0 : fake_among(&state->py, args) || compiling(&state->py) ? 1
                      : gck_tracing(&state->py);
    if (tracing < 0) {
        return NULL;
    }
    if (hit == NULL || tracing) {
        /* no store names it, or a block is compiled inside the region, which is not a call */
        return call_below(state, NULL, op, call, args, kwargs);
    }
    /* A mode that was entered inside comes first, as under torch's modes: it would not see a
     * replayed call. */
    const int modes = hit->replay ? gck_modes_that_watch(&state->py) : 0;
    if (modes < 0) {
        return NULL;
    }
    if (modes > 0) {
        return PyObject_CallFunction(state->py.call.through_modes, "OOOO", state->py.key, call, args,
                                     kwargs ? kwargs : Py_None);
    }
    gck_op_storage *store = (gck_op_storage *)Py_NewRef((PyObject *)hit->store);
    with.hit = hit;
    out = hit->replay ? gck_replay_call(hit, line, &here) : gck_record_call(store, line, &here);
    Py_DECREF((PyObject *)store);
    return out;
}

static PyMethodDef caught_def = {"caught", (PyCFunction)(void (*)(void))caught, METH_VARARGS | METH_KEYWORDS, NULL};

PyObject *gck_catcher(PyObject *module, PyObject *op)
{
    PyObject *self = Py_BuildValue("(OON)", module, op, PyObject_GetAttr(op, gck_state_of(module)->py.names._op));
    PyObject *function = self != NULL ? PyCFunction_New(&caught_def, self) : NULL;

    Py_XDECREF(self);
    return function;
}

int gck_catches_by_key(const gck_state *state, const gck_op_storage *store)
{
    return state->py.key != Py_None && !state->by_mode && !store->traced;
}

PyObject *gck_catch_by_mode(PyObject *module, PyObject *on)
{
    gck_state_of(module)->by_mode = on == Py_True;
    Py_RETURN_NONE;
}

PyObject *gck_selective_key(PyObject *module, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(gck_state_of(module)->py.key);
}
