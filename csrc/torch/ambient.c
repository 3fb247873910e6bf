/* ambient.c: the fast cases (CPU generator, no autocast, no device context).  The rare ones are
 * planned in gradckpt/_engine/region_callbacks.py and executed here by calls of builtins: no Python
 * code runs, and so no signal handler, while the state is half changed. */
#include "torch/ambient.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/generators.h"
#include "torch/rng.h"

/* 1 where torch keeps a flag per thread, and it is set; 0; -1. */
static int fx_tracing(const gck_py *py) { return py->fx_tracing == Py_None ? 0 : gck_ask(py->fx_tracing); }

static int set_fx_tracing(const gck_py *py, int value)
{
    return gck_done(PyObject_CallFunctionObjArgs(py->set_fx_tracing, value ? Py_True : Py_False, NULL));
}

int gck_ambient_capture(gck_py *py, gck_ambient *a, int preserve_rng, int exact, PyObject *args, PyObject *kwargs)
{
    int modes;

    a->exact = exact;
    if ((preserve_rng && (a->cpu_rng = gck_rng_stash(&py->rng)) == NULL)
        || gck_device_rng_capture(py, args, kwargs, preserve_rng, exact, &a->device_rng) < 0
        || (!exact && gck_device_rng_refuse_captured(py, a->device_rng) < 0)
        || (a->fx = fx_tracing(py)) < 0 || gck_autocast_capture(py, &a->autocast) < 0
        || (modes = gck_ask(py->function_stack_len)) < 0) {
        return -1;
    }
    a->device = modes ? PyObject_CallFunction(py->call.device_context, NULL) : NULL;
    if (a->device == Py_None) {
        Py_CLEAR(a->device);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int enter_rng(gck_py *py, const gck_ambient *a, gck_surroundings *s)
{
    if (a->cpu_rng != NULL && gck_rng_swap(&py->rng, a->cpu_rng, &s->cpu_rng) < 0) {
        return -1;
    }
    if (!a->exact && gck_device_rng_refuse_captured(py, a->device_rng) < 0) {
        return -1;
    }
    return a->device_rng == NULL ? 0 : gck_device_rng_swap(py, a->device_rng, &s->device_rng);
}

/* Call every (builtin, args) of the list, also after one failed.  0, or -1 with the first error. */
static int run_calls(PyObject *calls)
{
    gck_error error = {NULL, NULL, NULL};

    for (Py_ssize_t i = 0; i < PyList_Size(calls); i++) {        /* no other code has the list and its tuples */
        PyObject *call = PyList_GetItem(calls, i);
        Py_XDECREF(PyObject_CallObject(PyTuple_GetItem(call, 0), PyTuple_GetItem(call, 1)));
        gck_error_keep(&error);
    }
    return gck_error_return(&error);
}

/* Make the stack of torch function modes exactly `modes`.  0 or -1. */
static int set_modes(const gck_py *py, PyObject *modes)
{
    int more;

    while ((more = gck_ask(py->function_stack_len)) == 1) {
        if (gck_done(PyObject_CallNoArgs(py->pop_function_mode)) < 0) {
            return -1;
        }
    }
    for (Py_ssize_t i = 0; more == 0 && i < PyList_Size(modes); i++) {
        more = gck_done(PyObject_CallFunctionObjArgs(py->push_function_mode, PyList_GetItem(modes, i), NULL));
    }
    return more;
}

/* Set torch.fx's flag as in the forward. */
static int enter_fx(const gck_py *py, const gck_ambient *a, gck_surroundings *s)
{
    const int now = fx_tracing(py);

    if (now < 0 || now == a->fx) {
        return now < 0 ? -1 : 0;
    }
    s->fx = now;
    return set_fx_tracing(py, a->fx);
}

/* Plan how the default device is set, and set the modes.  0 or -1. */
static int enter_device(const gck_py *py, const gck_ambient *a, int with_device, PyObject *enter, PyObject *leave,
                        gck_surroundings *s)
{
    GCK_SCOPED PyObject *plan = PyObject_CallFunction(py->call.device_plan, "OiOO", a->device, with_device, enter,
                                                      leave);
    PyObject *inside, *around;

    if (plan == NULL || !PyArg_ParseTuple(plan, "OO", &inside, &around)) {
        return -1;
    }
    s->modes = Py_NewRef(around);
    return inside != Py_None ? set_modes(py, inside) : 0;
}

/* Set autocast and default device as in the forward. */
static int enter_contexts(const gck_py *py, const gck_ambient *a, int autocast, int with_device, gck_surroundings *s)
{
    GCK_SCOPED PyObject *enter = PyList_New(0), *leave = enter != NULL ? PyList_New(0) : NULL;

    if (leave == NULL || (autocast && gck_autocast_plan(py, &a->autocast, enter, leave) < 0)
        || (a->device != NULL && enter_device(py, a, with_device, enter, leave, s) < 0)) {
        return -1;
    }
    s->leave = Py_NewRef(leave);                 /* nothing was entered before */
    return run_calls(enter);
}

int gck_ambient_enter(gck_py *py, const gck_ambient *a, int with_device, gck_surroundings *s)
{
    int autocast;

    *s = (gck_surroundings){NULL, NULL, NULL, NULL, -1};
    if (enter_rng(py, a, s) < 0 || (autocast = gck_autocast_differs(py, &a->autocast)) < 0
        || ((autocast || a->device != NULL) && enter_contexts(py, a, autocast, with_device, s) < 0)
        || enter_fx(py, a, s) < 0) {
        gck_ambient_leave(py, s);
        return -1;
    }
    return 0;
}

int gck_ambient_leave(gck_py *py, gck_surroundings *s)
{
    gck_error error = gck_error_take();

    if (s->fx >= 0) {
        set_fx_tracing(py, s->fx);
        gck_error_keep(&error);
    }
    if (s->leave != NULL) {
        run_calls(s->leave);
        gck_error_keep(&error);
    }
    if (s->modes != NULL) {
        set_modes(py, s->modes);
        gck_error_keep(&error);
    }
    if (s->device_rng != NULL) {
        GCK_SCOPED PyObject *inside = NULL;
        gck_device_rng_swap(py, s->device_rng, &inside);
        gck_error_keep(&error);
    }
    if (s->cpu_rng != NULL) {
        gck_rng_swap_back(&py->rng, &s->cpu_rng);
    }
    gck_error_keep(&error);
    Py_CLEAR(s->leave);
    Py_CLEAR(s->modes);
    Py_CLEAR(s->device_rng);
    return gck_error_return(&error);
}

/* ---- torch.compile ---- */

int gck_dynamo_off(const gck_py *py, PyObject **before)
{
    GCK_SCOPED PyObject *callback = PyObject_CallNoArgs(py->frame_callback);

    *before = NULL;
    if (callback == NULL || callback == Py_None) {
        return callback == NULL ? -1 : 0;
    }
    *before = PyObject_CallFunctionObjArgs(py->set_frame_callback, Py_None, NULL);
    return *before == NULL ? -1 : 0;
}

void gck_dynamo_restore(const gck_py *py, PyObject *before)
{
    if (before == NULL) {
        return;
    }
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();
    if (gck_done(PyObject_CallFunctionObjArgs(py->set_frame_callback, before, NULL)) < 0) {
        PyErr_WriteUnraisable(before);
    }
    Py_DECREF(before);
}
