/* selective.c: operators caught while a region runs.
 *
 * Named operators are caught on torch's dispatch key `Negative`, below autograd and above the key
 * of dispatch modes.  torch's own fallback there does nothing to tensors without a pending
 * negation.  So a thread that includes the key runs as before, and our kernels for the named
 * operators are called.  Where another mode is active when a region begins, one of ours is put on
 * top of it (selective_mode.c), as for policies that are functions and must see every operator. */
#include "engine/selective/selective.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/selective/op_record_replay.h"
#include "engine/selective/op_hiding.h"
#include "engine/selective/op_outputs.h"
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
                        const gck_run *run)
{
    *active = (gck_active){
        .store = (gck_op_storage *)Py_NewRef((PyObject *)store),
        .replay = replay,
        .thread = PyThread_get_thread_ident(),
        .by_key = by_key,
        .busy = !by_key,
        .run = run,
        .outer = state->active,
    };
    state->active = active;
    if (!replay) {
        store->stamped = run != NULL && run->saved != NULL;
    } else if (store->traced) {
        active->counts = PyObject_CallFunctionObjArgs(state->py.defaultdict, state->py.count, NULL);
    }
    if ((replay && (store->traced ? active->counts == NULL
                                  : gck_matching_begin(&active->matching, store, run) < 0))
        || gck_replay_discrete_announce(state, active) < 0 || (by_key && set_key(&state->py, 1) < 0)) {
        gck_selective_end(state, active);
        return -1;
    }
    return 0;
}

void gck_selective_end(gck_state *state, gck_active *active)
{
    gck_active **link = &state->active;
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();

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
}

/* ---- named operators ---- */

/* Fast path: a pure float cast is not discrete, and kernels cast each Python scalar (it arrives as
 * that number).  This takes half the time of the operator itself.  NULL without an exception: the
 * call is more than a cast. */
static PyObject *plain_cast(const gck_py *py, PyObject *op, PyObject *args, PyObject *kwargs)
{
    PyObject *x = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    PyObject *dtype, *out = NULL;

    if (op != py->cast || kwargs == NULL || PyDict_Size(kwargs) != 1 || x == NULL
        || (dtype = PyDict_GetItem(kwargs, py->names.dtype)) == NULL
        || (dtype != py->float32 && dtype != py->bfloat16 && dtype != py->float16)) {
        return NULL;
    }
    if (PyFloat_Check(x)) {
        GCK_SCOPED PyObject *options = Py_BuildValue("{OOOO}", py->names.dtype, dtype, py->names.device, py->names.cpu);
        out = options != NULL ? PyObject_Call(py->scalar_tensor, args, options) : NULL;
    } else if ((PyObject *)Py_TYPE(x) == py->Tensor) {
        out = PyObject_CallMethodObjArgs(x, py->names.to, dtype, Py_False, Py_True, NULL);     /* non_blocking, copy */
    }
    return out;
}

/* Call an operator.  Kernels give each other Python numbers in place of tensors; here they arrive as numbers,
 * which few operators take. */
static PyObject *call_op(gck_state *state, PyObject *op, PyObject *call, PyObject *args, PyObject *kwargs)
{
    PyObject *out = PyObject_Call(call, args, kwargs);

    if (out != NULL || !PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        return out;
    }
    gck_error error = gck_error_take();
    GCK_SCOPED PyObject *tensors = PyObject_CallFunctionObjArgs(state->py.call.with_tensors, op, args, NULL);
    if (tensors == NULL || tensors == Py_None) {
        gck_error_return(&error);
        return NULL;
    }
    gck_error_drop(&error);
    return PyObject_Call(call, tensors, kwargs);
}

/* Call the operator itself, below `hit`: only stores around `hit` see it (NULL: none). */
static PyObject *call_below(gck_state *state, gck_active *hit, PyObject *op, PyObject *call, PyObject *args,
                            PyObject *kwargs)
{
    PyObject *out = NULL;

    gck_count_busy(state, hit, 1);
    const int alone = gck_active_here(state->active, PyThread_get_thread_ident()) == NULL;
    if (alone && set_key(&state->py, 0) == 0 && hit == NULL) {
        out = plain_cast(&state->py, op, args, kwargs);
    }
    if (out == NULL && !PyErr_Occurred()) {
        out = call_op(state, op, call, args, kwargs);
    }
    gck_count_busy(state, hit, -1);
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

int gck_selective_finish(gck_state *state, gck_active *active, int stopped)
{
    GCK_SCOPED gck_op_storage *store = (gck_op_storage *)Py_NewRef((PyObject *)active->store);
    gck_matching matching = active->matching;    /* what compares kept values is not to be caught */
    PyObject *modes;
    int status = 0;

    active->matching = (gck_matching){.n = 0};
    gck_selective_end(state, active);
    if (store->reusable && gck_settle_outputs(store) < 0) {
        status = -1;
    } else if (matching.surplus != NULL || matching.rivals > 0 || matching.made < matching.n) {
        status = gck_hide_begin(state, &modes);
        if (status == 0) {
            status = gck_matching_compare(&matching, store, stopped);
            status = gck_hide_end(state, modes) < 0 ? -1 : status;
        }
    }
    gck_matching_end(&matching);
    return status;
}

/* 1 when x is a fake tensor, whose mode has stepped aside to compute a shape. */
static int is_fake(void *py, PyObject *x) { return (PyObject *)Py_TYPE(x) == ((gck_py *)py)->FakeTensor; }

/* 1 while this thread compiles something. */
static int compiling(const gck_py *py)
{
    GCK_SCOPED PyObject *here = PyObject_GetAttr(py->guards, py->names.__dict__);      /* of this thread */
    PyObject *context = here != NULL ? PyDict_GetItemWithError(here, py->names.tracing_context) : NULL;

    gck_error_report();
    return context != NULL && context != Py_None;
}

/* Run an operator that belongs to no store: one that we call, or one inside a torch.func transform,
 * which calls it again on the level below with the key as it was.  Where the key is off a negation
 * is pending, which torch's fallback would resolve here. */
static PyObject *pass_on(gck_state *state, PyObject *op, PyObject *call, PyObject *args, PyObject *kwargs)
{
    const int on = gck_is_true(PyObject_CallFunctionObjArgs(state->py.is_included, state->py.key, NULL));
    PyObject *out = NULL;

    if (on == 0) {
        out = PyObject_CallFunction(state->py.call.call_negated, "OOO", call, args, kwargs ? kwargs : Py_None);
    } else if (on > 0 && set_key(&state->py, 0) == 0) {
        out = call_op(state, op, call, args, kwargs);
        if (set_key(&state->py, 1) < 0) {
            Py_CLEAR(out);
        }
    }
    return out;
}

/* The kernel of a caught operator; self is (module, operator, what calls it, effect: None, True: it
 * writes, False: it makes views unseen). */
static PyObject *caught(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *does = PyTuple_GetItem(self, 3);
    const gck_op_effect effect = does == Py_None ? GCK_READS : does == Py_True ? GCK_WRITES : GCK_VIEWS_UNSEEN;
    PyObject *x = effect != GCK_READS && PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL;
    gck_state *state = gck_state_of(PyTuple_GetItem(self, 0));
    PyObject *op = PyTuple_GetItem(self, 1), *call = PyTuple_GetItem(self, 2), *out;
    const unsigned long thread = PyThread_get_thread_ident();
    gck_active *hit = gck_active_here(state->active, thread);
    below with = {.state = state, .call = call};
    gck_call here = {.op = op, .key = op, .higher_order = call == op, .args = args, .kwargs = kwargs, .run = run_below,
                     .with = &with};
    int line = GCK_LINE_NONE;
    const int functorch = hit == NULL ? 0 : gck_functorch_active(&state->py);

    if (functorch < 0) {
        return NULL;
    }
    if (hit == NULL || functorch) {
        return pass_on(state, op, call, args, kwargs);
    }
    while (hit != NULL && (line = gck_op_storage_find(hit->store, &here)) < 0) {
        hit = gck_active_here(hit->outer, thread);
    }
    const int tracing = hit == NULL ? 0 : gck_each_item(args, is_fake, &state->py) || compiling(&state->py) ? 1
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
    GCK_SCOPED gck_op_storage *store = (gck_op_storage *)Py_NewRef((PyObject *)hit->store);
    with.hit = hit;
    return hit->replay ? gck_replay_call(hit, &here) : gck_record_call(hit, store, line, &here);
}

static PyMethodDef caught_def = {"caught", (PyCFunction)(void (*)(void))caught, METH_VARARGS | METH_KEYWORDS, NULL};

PyObject *gck_catcher(PyObject *module, PyObject *op)
{
    const gck_py *py = &gck_state_of(module)->py;
    const gck_op_effect effect = gck_op_effect_of(py, op);
    PyObject *does = effect == GCK_READS ? Py_None : effect == GCK_WRITES ? Py_True : Py_False;
    PyObject *call = PyObject_GetAttr(op, py->names._op);

    if (call == NULL && gck_clear_attribute_error() == 0) {     /* a higher order operator */
        call = Py_NewRef(op);
    }
    GCK_SCOPED PyObject *self = Py_BuildValue("(OONO)", module, op, call, does);
    return self != NULL ? PyCFunction_New(&caught_def, self) : NULL;
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

PyObject *gck_selective_key(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(gck_state_of(module)->py.key);
}
