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
#include "engine/saved/saved_hooks.h"

/* A fact about a thread, which no object holds. */
static _Thread_local gck_running *innermost;

void gck_running_enter(gck_running *r, gck_frame *frame, const gck_hooks *hooks, int replay)
{
    const unsigned long thread = PyThread_get_thread_ident();
    const gck_active *around = frame->state->active;

    while (around != NULL && around->thread != thread) {
        around = around->outer;
    }
    *r = (gck_running){.frame = frame, .hooks = hooks, .replay = replay, .around = around, .outer = innermost};
    innermost = r;
}

void gck_running_leave(const gck_running *r) { innermost = r->outer; }

/* (the region's calls, replay, preserve_rng_state, tensors saved so far, pack, unpack), the hooks None
 * for a region that is one node.  The hooks hold the frame, or the recompute. */
PyObject *gck_running_region(PyObject *module, PyObject *unused)
{
    const gck_running *r = innermost;
    PyObject *pack, *unpack, *result = NULL;

    (void)module;
    (void)unused;
    if (r == NULL) {
        Py_RETURN_NONE;
    }
    if (r->frame->calls == NULL && (r->frame->calls = PyDict_New()) == NULL) {
        return NULL;
    }
    pack = r->hooks != NULL ? PyCFunction_New(r->hooks->pack, r->hooks->self) : Py_NewRef(Py_None);
    unpack = r->hooks != NULL ? PyCFunction_New(r->hooks->unpack, r->hooks->self) : Py_NewRef(Py_None);
    if (pack != NULL && unpack != NULL) {
        result = Py_BuildValue("(OOOnOO)", r->frame->calls, r->replay ? Py_True : Py_False,
                               r->frame->ambient.cpu_rng != NULL ? Py_True : Py_False, r->frame->nslots, pack, unpack);
    }
    Py_XDECREF(pack);
    Py_XDECREF(unpack);
    return result;
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
    const unsigned long thread = PyThread_get_thread_ident();
    const gck_state *state = gck_state_of(module);
    int wanted = 0;

    for (gck_active *a = state->active; innermost != NULL && a != NULL && a != innermost->around && wanted == 0;
         a = a->outer) {
        const gck_op_policy *policy = a->thread == thread ? a->store->policy : NULL;
        if (policy != NULL && PySet_Size(policy->wanted) > 0) {
            wanted = gck_is_true(PyObject_CallFunction(match, "Oi", policy->wanted, compresses_named(policy)));
            a->store->met += wanted > 0;
        }
    }
    return wanted < 0 ? NULL : PyBool_FromLong(wanted);
}

/* 1 when these hooks, a pair, are those of the region; 0; -1. */
static int are_of_region(const gck_py *py, PyObject *pair, const gck_running *r)
{
    PyObject *pack = PySequence_GetItem(pair, 0);
    PyObject *self = pack != NULL ? PyObject_GetAttr(pack, py->names.__self__) : NULL;
    const int same = self != NULL && self == r->hooks->self;

    Py_XDECREF(pack);
    Py_XDECREF(self);
    /* a function of the user's has no such attribute */
    return pack == NULL || (self == NULL && gck_clear_attribute_error() < 0) ? -1 : same;
}

/* The pair of hooks that sees what the innermost region keeps for backward: hooks that its function
 * has pushed, else those around it; None.  Here, so that no signal handler runs meanwhile. */
PyObject *gck_hooks_around_region(PyObject *module, PyObject *unused)
{
    const gck_py *py = &gck_state_of(module)->py;
    const gck_running *r = innermost;
    PyObject *top = PyObject_CallFunctionObjArgs(py->top_hooks, Py_True, NULL), *below = NULL;
    int own;

    (void)unused;
    if (top == NULL || top == Py_None || r == NULL || r->hooks == NULL) {
        return top;
    }
    own = are_of_region(py, top, r);
    if (own == 0 && gck_saved_hooks_feed_outer(top)) {   /* the region would hold payloads that it cannot make again */
        PyErr_SetString(PyExc_RuntimeError, "gradckpt: a call with recompute=False lies in compress_saved() inside its "
                                            "region; put compress_saved() around the region");
        Py_CLEAR(top);
    }
    if (own == 0) {
        return top;
    }
    if (own > 0 && gck_done(PyObject_CallFunctionObjArgs(py->pop_hooks, NULL)) == 0) {
        below = PyObject_CallFunctionObjArgs(py->top_hooks, Py_True, NULL);
        if (gck_done(PyObject_Call(py->push_hooks, top, NULL)) < 0) {
            Py_CLEAR(below);
        }
    }
    Py_DECREF(top);
    return below;
}

PyObject *gck_cpu_rng_state(PyObject *module, PyObject *unused)
{
    (void)unused;
    return gck_rng_stash(&gck_state_of(module)->py.rng);
}

PyObject *gck_set_cpu_rng_state(PyObject *module, PyObject *rng_state)
{
    return gck_rng_put(&gck_state_of(module)->py.rng, rng_state) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Hide the operators of this thread from the stores of the innermost region, and of what was
 * entered inside it (1), or no longer (-1).  True where one of their policies is a function. */
PyObject *gck_hide_operators(PyObject *module, PyObject *by)
{
    const gck_state *state = gck_state_of(module);
    const unsigned long thread = PyThread_get_thread_ident();
    const long n = PyLong_AsLong(by);
    int asked = 0;

    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    for (gck_active *a = state->active; innermost != NULL && a != NULL && a != innermost->around; a = a->outer) {
        if (a->thread == thread) {
            a->hidden += (int)n;
            asked |= a->store->policy != NULL && a->store->policy->rows == Py_None;
        }
    }
    return PyBool_FromLong(asked);
}
