/* ambient.c: the fast cases here (CPU generator, no autocast, no device context); the
 * rare ones in gradckpt/_shim.py, which uses torch's own context managers. */
#include "ambient.h"

#include <string.h>

/* New reference: a copy of the state, or NULL. */
static PyObject *cpu_rng_state(const gck_py *py)
{
    return PyObject_CallMethodObjArgs(py->default_generator, py->names.get_state, NULL);
}

/* Same bytes in both state tensors: 1 or 0. */
static int same_state(const gck_py *py, PyObject *a, PyObject *b)
{
    gck_dl_tensor x, y;

    if (py->dlpack->dltensor_from_py_object_no_sync(a, &x) != 0
        || py->dlpack->dltensor_from_py_object_no_sync(b, &y) != 0) {
        PyErr_Clear();
        return 0;
    }
    return x.ndim == 1 && y.ndim == 1 && x.shape[0] == y.shape[0] && x.dtype.bits == 8 && y.dtype.bits == 8
        && memcmp(x.data, y.data, (size_t)x.shape[0]) == 0;
}

/* New reference: the state now.  Regions between which nobody drew share one copy: that
 * is 5 KiB less for each, and what is freed at once stays in cache. */
static PyObject *stash_cpu_rng(gck_py *py)
{
    PyObject *state = cpu_rng_state(py);

    if (state == NULL) {
        return NULL;
    }
    if (py->last_rng != NULL && same_state(py, state, py->last_rng)) {
        Py_DECREF(state);
        return Py_NewRef(py->last_rng);
    }
    Py_XDECREF(py->last_rng);
    py->last_rng = Py_NewRef(state);
    return state;
}

static int set_cpu_rng(const gck_py *py, PyObject *state)
{
    PyObject *result = PyObject_CallMethodObjArgs(py->default_generator, py->names.set_state, state, NULL);

    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Store method(...) of the shim in *out, None as NULL.  0 or -1. */
static int from_shim(PyObject *result, PyObject **out)
{
    if (result == NULL) {
        return -1;
    }
    if (result == Py_None) {
        Py_CLEAR(result);
    }
    *out = result;
    return 0;
}

int gck_ambient_capture(gck_py *py, gck_ambient *a, int preserve_rng, PyObject *args, PyObject *kwargs)
{
    int truth;

    if (preserve_rng) {
        if ((a->cpu_rng = stash_cpu_rng(py)) == NULL) {
            goto error;
        }
        if (py->has_accelerator
            && from_shim(PyObject_CallMethod(py->shim, "device_rng_capture", "OO", args, kwargs ? kwargs : Py_None),
                         &a->device_rng) < 0) {
            goto error;
        }
    }
    truth = gck_ask(py->any_autocast);
    if (truth < 0 || (truth && from_shim(PyObject_CallMethod(py->shim, "autocast_capture", NULL), &a->autocast) < 0)) {
        goto error;
    }
    truth = gck_ask(py->function_stack_len);
    if (truth < 0
        || (truth && from_shim(PyObject_CallMethod(py->shim, "device_context", NULL), &a->device) < 0)) {
        goto error;
    }
    return 0;

error:
    gck_ambient_clear(a);
    return -1;
}

static int enter_rng(const gck_py *py, const gck_ambient *a, gck_surroundings *s)
{
    if (a->cpu_rng == NULL) {
        return 0;
    }
    if ((s->cpu_rng = cpu_rng_state(py)) == NULL || set_cpu_rng(py, a->cpu_rng) < 0) {
        return -1;
    }
    return a->device_rng == NULL
        ? 0 : from_shim(PyObject_CallMethod(py->shim, "device_rng_swap", "O", a->device_rng), &s->device_rng);
}

int gck_ambient_enter(const gck_py *py, const gck_ambient *a, gck_surroundings *s)
{
    int autocast;

    *s = (gck_surroundings){NULL, NULL, NULL};
    if (enter_rng(py, a, s) < 0) {
        goto error;
    }
    /* Nothing enabled then and nothing now: entering autocast would change nothing. */
    autocast = a->autocast != NULL ? 1 : gck_ask(py->any_autocast);
    if (autocast < 0) {
        goto error;
    }
    if ((autocast || a->device != NULL)
        && from_shim(PyObject_CallMethod(py->shim, "contexts_enter", "iOO", autocast,
                                         a->autocast ? a->autocast : Py_None, a->device ? a->device : Py_None),
                     &s->contexts) < 0) {
        goto error;
    }
    return 0;

error:
    gck_ambient_leave(py, s);
    return -1;
}

/* The first exception is the one to report; steps after it start with none set. */
static int keep_first(int failed, PyObject **type, PyObject **value, PyObject **traceback)
{
    if (failed && *type == NULL) {
        PyErr_Fetch(type, value, traceback);
    } else if (failed) {
        PyErr_Clear();
    }
    return failed;
}

int gck_ambient_leave(const gck_py *py, gck_surroundings *s)
{
    PyObject *type, *value, *traceback, *result;
    int failed = 0;

    PyErr_Fetch(&type, &value, &traceback);
    if (s->contexts != NULL) {
        result = PyObject_CallMethod(py->shim, "contexts_leave", "O", s->contexts);
        failed |= keep_first(result == NULL, &type, &value, &traceback);
        Py_XDECREF(result);
    }
    if (s->device_rng != NULL) {
        result = PyObject_CallMethod(py->shim, "device_rng_swap", "O", s->device_rng);
        failed |= keep_first(result == NULL, &type, &value, &traceback);
        Py_XDECREF(result);
    }
    if (s->cpu_rng != NULL) {
        failed |= keep_first(set_cpu_rng(py, s->cpu_rng) < 0, &type, &value, &traceback);
    }
    Py_CLEAR(s->contexts);
    Py_CLEAR(s->device_rng);
    Py_CLEAR(s->cpu_rng);
    PyErr_Restore(type, value, traceback);
    return failed ? -1 : 0;
}

int gck_ambient_traverse(gck_ambient *a, visitproc visit, void *arg)
{
    Py_VISIT(a->cpu_rng);
    Py_VISIT(a->device_rng);
    Py_VISIT(a->autocast);
    Py_VISIT(a->device);
    return 0;
}

void gck_ambient_clear(gck_ambient *a)
{
    Py_CLEAR(a->cpu_rng);
    Py_CLEAR(a->device_rng);
    Py_CLEAR(a->autocast);
    Py_CLEAR(a->device);
}
