/* running.c: the regions that run in each thread.
 *
 * A call inside a region that does not run again (gradckpt.policies.region, torch_remat's regions)
 * has to know the region and which of its two runs this is.  Operators inside such a call are
 * hidden from the region's stores, because the recompute, which counts calls of operators, does not
 * meet them. */
#include "engine/region/running.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "engine/state.h"
#include "engine/innermost_hooks.h"
#include "engine/selective/selective_mode.h"

/* A fact about a thread, which no object holds. */
static _Thread_local gck_running *innermost;

/* Add the originals of these arguments to the list.  0 or -1. */
static int keep_originals(gck_state *state, const gck_packed *args, Py_ssize_t n, PyObject *list)
{
    int status = 0;

    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        const gck_payload *payload = args[i].kind == GCK_PACKED_PAYLOAD ? (gck_payload *)args[i].value : NULL;
        PyObject *reference = payload != NULL ? payload->original
                            : args[i].kind == GCK_PACKED_SAVED ? args[i].state : NULL;
        PyObject *original = reference != NULL ? PyWeakref_GetObject(reference) : Py_None;
        if (original != Py_None) {
            state->stats.held_bytes += payload != NULL ? payload->bytes_in : 0;
            status = PyList_Append(list, original);
        }
        status = status < 0 ? -1 : keep_originals(state, args[i].leaves, args[i].nleaves, list);
    }
    return status;
}

int gck_is_approximate(const gck_frame *frame)
{
    const gck_op_storage *store = gck_frame_store(frame);

    return frame->approximate || (store != NULL && gck_op_storage_is_approximate(store));
}

int gck_running_enter(gck_running *r, gck_frame *frame, const gck_hooks *hooks, int replay)
{
    const gck_active *around = gck_active_of_thread(frame->state->active);
    gck_running *outermost = innermost;

    while (outermost != NULL && outermost->outer != NULL) {
        outermost = outermost->outer;
    }
    /* can its recompute have other values? */
    const int changes = frame->approximate || frame->store != NULL
                     || gck_context_store(frame->state, frame->recompute_context) != NULL;

    if (changes && !replay) {
        if (outermost != NULL
            && ((outermost->ended == NULL && (outermost->ended = PyList_New(0)) == NULL)
                || PyList_Append(outermost->ended, (PyObject *)frame) < 0
                || keep_originals(frame->state, frame->args, frame->nargs + frame->nkwargs, outermost->ended) < 0)) {
            return -1;
        }
        frame->exact = 1;
    }
    *r = (gck_running){.frame = frame, .hooks = hooks, .replay = replay, .around = around, .outer = innermost};
    innermost = r;
    return 0;
}

void gck_running_leave(gck_running *r)
{
    innermost = r->outer;
    if (r->outer != NULL) {
        return;
    }
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();      /* what dies may run Python */
    GCK_SCOPED PyObject *ended = r->ended;
    r->frame->exact = 0;
    r->ended = NULL;
    for (Py_ssize_t i = 0; ended != NULL && i < PyList_Size(ended); i++) {
        PyObject *each = PyList_GetItem(ended, i);
        if (Py_TYPE(each) == r->frame->state->Frame) {
            ((gck_frame *)each)->exact = 0;
        }
    }
}

/* *r: the region that receives what this thread saves now, borrowed; NULL: none.  The innermost region
 * does not where torch's checkpoint has its hooks on top: that runs again as a whole, by itself.  Hooks
 * of the user's inside the region leave it the region of the call.  0 or -1. */
static int receiving(const gck_state *state, const gck_running **r)
{
    gck_hooks_owner owner;
    PyObject *self;
    GCK_SCOPED PyObject *top = innermost != NULL ? gck_innermost_hooks(state, &owner, &self) : Py_NewRef(Py_None);
    const int others = innermost != NULL && top != NULL
        && (owner == GCK_HOOKS_TORCHS_REGION
            || (owner == GCK_HOOKS_REGION && innermost->hooks != NULL && self != innermost->hooks->pack));

    *r = others ? NULL : innermost;
    return top == NULL ? -1 : 0;
}

/* (the region's calls, replay, preserve_rng_state, approximate, tensors saved so far, pack, unpack), the hooks None
 * for a region that is one node.  The hooks hold the frame, or the recompute. */
PyObject *gck_running_region(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const gck_running *r;
    GCK_SCOPED PyObject *pack = NULL, *unpack = NULL;

    if (receiving(gck_state_of(module), &r) < 0) {
        return NULL;
    }
    if (r == NULL) {
        Py_RETURN_NONE;
    }
    if (r->frame->calls == NULL && (r->frame->calls = PyDict_New()) == NULL) {
        return NULL;
    }
    pack = r->hooks != NULL ? Py_NewRef(r->hooks->pack) : Py_NewRef(Py_None);
    unpack = r->hooks != NULL ? PyCFunction_New(r->hooks->unpack, r->hooks->pack) : Py_NewRef(Py_None);
    return pack == NULL || unpack == NULL ? NULL
         : Py_BuildValue("(OOOOnOO)", r->frame->calls, r->replay ? Py_True : Py_False,
                         r->frame->ambient.cpu_rng != NULL ? Py_True : Py_False,
                         gck_is_approximate(r->frame) ? Py_True : Py_False, r->frame->nslots, pack, unpack);
}

/* 1 when the policy keeps named outputs compressed. */
static int compresses_named(const gck_op_policy *policy)
{
    int found = 0;

    for (int i = 0; i < policy->n; i++) {
        found |= policy->named[i].keep == GCK_OP_LABEL && policy->named[i].plan.codec != NULL;
    }
    return found;
}

/* match(names, compressed) is asked for each policy of the innermost region that lists names: does
 * it list this one? */
PyObject *gck_is_name_wanted(PyObject *module, PyObject *match)
{
    gck_active *a = innermost != NULL ? gck_active_of_thread(gck_state_of(module)->active) : NULL;
    int wanted = 0;

    for (; a != NULL && a != innermost->around && wanted == 0; a = gck_active_of_thread(a->outer)) {
        const gck_op_policy *policy = a->store->policy;
        if (policy != NULL && PySet_Size(policy->wanted) > 0) {
            wanted = gck_is_true(PyObject_CallFunction(match, "Oi", policy->wanted, compresses_named(policy)));
            a->store->met += wanted > 0;
        }
    }
    return wanted < 0 ? NULL : PyBool_FromLong(wanted);
}

/* The pair of hooks that sees what the innermost region keeps for backward: hooks that its function
 * has pushed, else those around it; None.  Those of another region do not count: what is kept stays,
 * also where that region runs again. */
PyObject *gck_hooks_around_region(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const gck_state *state = gck_state_of(module);
    gck_hooks_owner owner;
    PyObject *self;
    GCK_SCOPED PyObject *found = innermost != NULL && innermost->hooks != NULL
        ? gck_hooks_beneath(state, innermost->hooks->pack, &owner) : gck_innermost_hooks(state, &owner, &self);

    return found != NULL && (owner == GCK_HOOKS_REGION || owner == GCK_HOOKS_TORCHS_REGION)
         ? Py_NewRef(Py_None) : gck_give(&found);
}

PyObject *gck_cpu_rng_state(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return gck_rng_stash(&gck_state_of(module)->py.rng);
}

PyObject *gck_set_cpu_rng_state(PyObject *module, PyObject *rng_state)
{
    return gck_rng_set(&gck_state_of(module)->py.rng, rng_state) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Hide the operators of this thread from the stores of the innermost region, and of what was
 * entered inside it (1), or no longer (-1).  True where one of their policies is a function. */
PyObject *gck_hide_operators(PyObject *module, PyObject *by)
{
    gck_active *a = innermost != NULL ? gck_active_of_thread(gck_state_of(module)->active) : NULL;
    const long n = PyLong_AsLong(by);
    int asked = 0;

    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    for (; a != NULL && a != innermost->around; a = gck_active_of_thread(a->outer)) {
        a->hidden += (int)n;
        asked |= a->store->policy != NULL && a->store->policy->rows == Py_None;
    }
    return PyBool_FromLong(asked);
}
