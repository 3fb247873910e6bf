/* rerun.c: enters and leaves the state in which a region runs again. */
#include "rerun.h"

#include "../torch/dynamo.h"
#include "parameters.h"

/* Recomputes under way on this thread.  A fact about a thread, which no object has. */
static _Thread_local int depth;

PyObject *gck_is_recomputing(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(depth > 0);
}

PyObject *gck_forget_modules(PyObject *module, PyObject *unused)
{
    (void)unused;
    PyDict_Clear(gck_state_of(module)->stateless);
    PyDict_Clear(gck_state_of(module)->closed);
    Py_RETURN_NONE;
}

/* ---- running statistics ---- */

/* New reference: (function, *those of its arguments that are no tensors). */
static PyObject *function_and_others(const gck_frame *frame)
{
    PyObject *list = PyList_New(0), *tuple;
    int status = list == NULL ? -1 : PyList_Append(list, frame->function);

    for (Py_ssize_t i = 0; status == 0 && i < frame->nargs + frame->nkwargs; i++) {
        const gck_entry *entry = &frame->args[i];
        const int other = entry->kind == GCK_TREE || (entry->kind == GCK_KEPT && entry->value != NULL);
        status = other ? PyList_Append(list, entry->kind == GCK_TREE ? Py_Ellipsis : entry->value) : 0;
    }
    tuple = status == 0 ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return tuple;
}

static int enter_buffers(gck_frame *frame, gck_rerun *r)
{
    gck_state *state = frame->state;
    PyObject *function, *args;

    if (!frame->buffers_once || gck_module_known(state->stateless, frame->function)) {
        return 0;
    }
    function = PyObject_GetAttrString(state->py.shim, "buffers_enter");
    args = function != NULL ? function_and_others(frame) : NULL;
    r->buffers = args != NULL ? PyObject_Call(function, args, NULL) : NULL;
    Py_XDECREF(function);
    Py_XDECREF(args);
    if (r->buffers == Py_None) {
        Py_CLEAR(r->buffers);
        return gck_module_remember(state, state->stateless, frame->function);
    }
    return r->buffers == NULL ? -1 : 0;
}

/* ---- begin, end ---- */

static int begin(gck_frame *frame, gck_rerun *r)
{
    gck_py *py = &frame->state->py;

    r->buffers = NULL;
    if (frame->parameters != NULL) {
        PyObject *result = PyObject_CallMethod(py->shim, "check_parameters", "O", frame->parameters);
        if (result == NULL) {
            return -1;
        }
        Py_DECREF(result);
    }
    if (gck_ambient_enter(py, &frame->ambient, frame->recompute_context == NULL, &r->surroundings) < 0) {
        return -1;
    }
    if (enter_buffers(frame, r) < 0) {
        gck_ambient_leave(py, &r->surroundings);
        return -1;
    }
    r->grad = gck_torch.aoti_torch_grad_mode_is_enabled();
    gck_torch.aoti_torch_grad_mode_set_enabled(true);
    depth++;
    return 0;
}

int gck_rerun_begin(gck_frame *frame, gck_rerun *r)
{
    const gck_py *py = &frame->state->py;

    if (gck_dynamo_off(py, &r->dynamo) < 0) {
        return -1;
    }
    if (begin(frame, r) < 0) {
        gck_dynamo_restore(py, r->dynamo);
        return -1;
    }
    return 0;
}

int gck_rerun_end(gck_frame *frame, gck_rerun *r)
{
    PyObject *type, *value, *traceback;
    int status = 0;

    depth--;
    gck_torch.aoti_torch_grad_mode_set_enabled(r->grad);
    if (r->buffers != NULL) {
        PyErr_Fetch(&type, &value, &traceback);
        PyObject *result = PyObject_CallMethod(r->buffers, "close", NULL);
        status = result == NULL ? -1 : 0;
        Py_XDECREF(result);
        Py_CLEAR(r->buffers);
        if (type != NULL) {
            PyErr_Restore(type, value, traceback);   /* the first exception is the one to report */
        }
    }
    if (gck_ambient_leave(&frame->state->py, &r->surroundings) < 0) {
        status = -1;
    }
    gck_dynamo_restore(&frame->state->py, r->dynamo);
    return status;
}
