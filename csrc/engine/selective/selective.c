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
#include "engine/selective/op_written.h"
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

int gck_selective_begin(gck_state *state, gck_active *active, gck_op_storage *store, int replay, int by_key,
                        const Py_ssize_t *saved)
{
    *active = (gck_active){
        .store = (gck_op_storage *)Py_NewRef((PyObject *)store),
        .replay = replay,
        .thread = PyThread_get_thread_ident(),
        .by_key = by_key,
        .busy = !by_key,
        .saved = saved,
        .outer = state->active,
    };
    state->active = active;
    if (!replay) {
        store->stamped = saved != NULL;
    } else if (store->traced) {
        active->counts = PyObject_CallFunctionObjArgs(state->py.defaultdict, state->py.count, NULL);
    }
    if ((replay && (store->traced ? active->counts == NULL
                                  : gck_matching_begin(&active->matching, store, saved != NULL) < 0))
        || gck_replay_discrete_announce(state, active) < 0 || (by_key && set_key(&state->py, 1) < 0)) {
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
    gck_matching_end(&active->matching);
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

void gck_selective_hide(gck_state *state, int by)
{
    const unsigned long thread = PyThread_get_thread_ident();

    for (gck_active *a = state->active; a != NULL; a = a->outer) {
        a->hidden += a->thread == thread ? by : 0;
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

/* 1: a line for discrete outputs, all of which are kept; 0: one of the policy's. */
static int is_discrete(const gck_op_storage *store, int line)
{
    return store->policy == NULL || line >= store->policy->n;
}

/* Are the outputs of this call to be kept? */
static int wanted(gck_op_storage *store, int line)
{
    const gck_op_rule *named = gck_op_storage_rule(store, line);

    if (is_discrete(store, line)) {
        return 1;
    }
    const int64_t call = store->counters[named->group]++;
    return named->keep != GCK_OP_RECOMPUTE && (named->every <= 1 || call % named->every == named->phase);
}

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

/* Keep those of a call's outputs that the policy names.  The call is one that runs again until they
 * are stored, because the policy and the code that stores them may call operators too.  0 or -1. */
static int keep_outputs(gck_op_storage *store, int line, const gck_call *call, gck_draw *draw, PyObject *out)
{
    gck_op_rule own = {.op = NULL};
    const gck_op_rule *rule = line >= 0 ? gck_op_storage_rule(store, line) : NULL;
    const Py_ssize_t index = gck_op_storage_add(store, call);
    const int keep = index < 0 ? -1 : line >= 0 ? wanted(store, line) : ask(store, call, out, &own, &rule);
    PyObject *modes;
    int status;

    if (keep <= 0 || hide_begin(store->state, &modes) < 0) {
        return keep == 0 ? 0 : -1;
    }
    if (rule->keep == GCK_OP_SAVE) {
        status = gck_op_storage_keep(store, index, gck_op_output_keep(store, out, &rule->plan));
    } else if (rule->keep == GCK_OP_LABEL) {
        status = gck_op_label_candidate(store, line, index, out);
    } else {
        store->calls[index].lasting = line >= 0 && is_discrete(store, line);
        status = gck_op_storage_keep(store, index, gck_op_output_keep_discrete(store, call, rule->form, out));
    }
    if (status == 0 && draw->before != NULL) {
        status = gck_op_output_note_draw(store, index, draw);
    }
    return hide_end(store->state, modes) < 0 ? -1 : status;
}

/* Read what tells the call from others.  0 or -1. */
static int read_kind(const gck_py *py, gck_call *call, const gck_active *active)
{
    const Py_hash_t hash = call->key == call->op ? (Py_hash_t)(intptr_t)call->op : PyObject_Hash(call->key);

    call->kind = gck_call_kind_of(py, (uint64_t)hash, call->args, call->kwargs);
    call->stamp = active->saved != NULL ? *active->saved : 0;
    return hash == -1 ? -1 : 0;
}

PyObject *gck_record_call(const gck_active *active, gck_op_storage *store, int line, gck_call *call)
{
    gck_py *py = &store->state->py;
    gck_draw draw = {NULL, NULL};
    const int draws = read_kind(py, call, active) < 0 ? -1
                    : line >= 0 ? gck_op_storage_rule(store, line)->draws : gck_op_draws(py, call->op);
    PyObject *out = draws < 0 || (draws && gck_draw_begin(py, call->args, call->kwargs, &draw) < 0) ? NULL
                  : call->run(call);

    if (out != NULL && keep_outputs(store, line, call, &draw, out) < 0) {
        Py_CLEAR(out);
    }
    gck_draw_clear(&draw);
    return out;
}

/* The call of the forward whose entry serves this call has just been found.  New reference. */
static PyObject *give(gck_active *active, gck_op_storage *store, gck_call *call, Py_ssize_t index)
{
    const gck_recorded_call *of = &store->calls[index];
    PyObject *entry = Py_NewRef(of->entry), *drawn = Py_XNewRef(of->drawn), *key = Py_NewRef(of->key), *modes, *out = NULL;

    if (entry == store->state->py.consumed_mark) {
        gck_done(PyObject_CallFunction(store->state->py.call.raise_no_entry, "Oiii", key, 0, 1, 1));
    } else {
        if (!store->reusable && !of->lasting) {
            gck_matching_consume(&active->matching, store, index);
        }
        if (hide_begin(store->state, &modes) == 0) {
            out = gck_op_output_give(store, call, entry, drawn);
            if (hide_end(store->state, modes) < 0) {
                Py_CLEAR(out);
            }
        }
    }
    Py_DECREF(entry);
    Py_XDECREF(drawn);
    Py_DECREF(key);
    return out;
}

/* The same call of a trace, by its number among those of its operator. */
static PyObject *replay_traced(gck_active *active, gck_op_storage *store, gck_call *call)
{
    const gck_py *py = &store->state->py;
    PyObject *counts = Py_XNewRef(active->counts), *calls = PyDict_GetItemWithError(store->storage, call->key);
    PyObject *count = NULL, *index = NULL, *entry = NULL, *out = NULL;

    Py_XINCREF(calls);
    if (calls != NULL && !PyDict_Check(calls)) {
        PyErr_Format(PyExc_TypeError,
                     "gradckpt: the storage of a selective region holds %R, which gradckpt did not write", calls);
    }
    count = counts != NULL && !PyErr_Occurred() ? PyObject_GetItem(counts, call->key) : NULL;
    index = count != NULL ? PyIter_Next(count) : NULL;
    entry = index != NULL && calls != NULL ? PyDict_GetItemWithError(calls, index) : NULL;
    Py_XINCREF(entry);
    if (entry == py->recompute_mark) {
        out = call->run(call);
    } else if (entry != NULL && entry != py->consumed_mark) {
        if (store->reusable || PyDict_SetItem(calls, index, py->consumed_mark) == 0) {
            out = PyObject_CallFunction(py->call.traced_value, "Oi", entry, store->mutation);
        }
    } else if (!PyErr_Occurred() && index != NULL) {
        gck_done(PyObject_CallFunction(py->call.raise_no_entry, "OOii", call->key, index, calls != NULL, entry != NULL));
    }
    Py_XDECREF(counts);
    Py_XDECREF(calls);
    Py_XDECREF(count);
    Py_XDECREF(index);
    Py_XDECREF(entry);
    return out;
}

/* 1 when nothing is kept of a call, or what is kept was written into; 0; -1. */
static int runs_again(gck_op_storage *store, Py_ssize_t index)
{
    PyObject *entry = Py_NewRef(store->calls[index].entry);
    const int same = entry == store->state->py.recompute_mark ? 0 : gck_op_output_settle(store, entry);

    Py_DECREF(entry);
    return same < 0 ? -1 : !same;
}

PyObject *gck_replay_call(gck_active *active, gck_call *call)
{
    gck_op_storage *store = (gck_op_storage *)Py_NewRef((PyObject *)active->store);
    Py_ssize_t index = GCK_NO_MATCH;
    PyObject *out = NULL;

    if (store->traced) {
        out = replay_traced(active, store, call);
    } else if (read_kind(&store->state->py, call, active) == 0
               && (index = gck_matching_find(&active->matching, store, call)) != -1) {
        const int again = index == GCK_NO_MATCH ? 1 : runs_again(store, index);
        out = again < 0 ? NULL : again ? call->run(call) : give(active, store, call, index);
    }
    Py_DECREF((PyObject *)store);
    return out;
}

int gck_selective_finish(gck_state *state, gck_active *active, int stopped)
{
    gck_op_storage *store = (gck_op_storage *)Py_NewRef((PyObject *)active->store);
    gck_matching matching = active->matching;    /* what compares kept values is not to be caught */
    PyObject *modes;
    int status = 0;

    active->matching = (gck_matching){.n = 0};
    gck_selective_end(state, active);
    if (store->reusable && gck_settle_outputs(store) < 0) {
        status = -1;
    } else if (matching.surplus != NULL || matching.made < matching.n) {
        status = hide_begin(state, &modes);
        if (status == 0) {
            status = gck_matching_judge(&matching, store, stopped);
            status = hide_end(state, modes) < 0 ? -1 : status;
        }
    }
    gck_matching_end(&matching);
    Py_DECREF((PyObject *)store);
    return status;
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

int gck_effect_begin(gck_state *state, gck_op_effect effect, PyObject *x)
{
    PyObject *modes;
    int status = gck_is_kept_memory(state, x);

    if (status > 0 && effect == GCK_WRITES && (status = hide_begin(state, &modes)) == 0) {
        status = gck_before_write(state, x);
        status = hide_end(state, modes) < 0 || status < 0 ? -1 : 1;
    }
    return status;
}

int gck_effect_end(gck_state *state, PyObject *x, PyObject *out)
{
    PyObject *modes;
    int status = hide_begin(state, &modes);

    if (status == 0) {
        status = gck_after_view(state, x, out);
        status = hide_end(state, modes) < 0 ? -1 : status;
    }
    return status;
}

/* The kernel of a caught operator; self is (module, operator, what calls it, its effect). */
static PyObject *caught(PyObject *self, PyObject *args, PyObject *kwargs)
{
    const gck_op_effect effect = (gck_op_effect)PyLong_AsLong(PyTuple_GetItem(self, 3));
    PyObject *x = effect != GCK_READS && PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL;
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
    const int touches = tracing || x == NULL ? 0 : gck_effect_begin(state, effect, x);
    if (touches < 0) {
        return NULL;
    }
    if (hit == NULL || tracing) {
        /* no store names it, or a block is compiled inside the region, which is not a call */
        out = call_below(state, NULL, op, call, args, kwargs);
        if (touches && out != NULL && effect == GCK_VIEWS_UNSEEN && gck_effect_end(state, x, out) < 0) {
            Py_CLEAR(out);
        }
        return out;
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
    out = hit->replay ? gck_replay_call(hit, &here) : gck_record_call(hit, store, line, &here);
    Py_DECREF((PyObject *)store);
    return out;
}

static PyMethodDef caught_def = {"caught", (PyCFunction)(void (*)(void))caught, METH_VARARGS | METH_KEYWORDS, NULL};

PyObject *gck_catcher(PyObject *module, PyObject *op)
{
    const gck_py *py = &gck_state_of(module)->py;
    PyObject *self = Py_BuildValue("(OONi)", module, op, PyObject_GetAttr(op, py->names._op),
                                   (int)gck_op_effect_of(py, op));
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
