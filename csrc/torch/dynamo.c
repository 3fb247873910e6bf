/* dynamo.c: the hook of this thread that hands frames to torch.compile; methods that it can read. */
#include "dynamo.h"

int gck_dynamo_off(const gck_py *py, PyObject **before)
{
    PyObject *callback = PyObject_CallNoArgs(py->frame_callback);

    *before = NULL;
    if (callback == NULL) {
        return -1;
    }
    if (callback != Py_None) {
        *before = PyObject_CallFunctionObjArgs(py->set_frame_callback, Py_None, NULL);
    }
    const int status = callback != Py_None && *before == NULL ? -1 : 0;
    Py_DECREF(callback);
    return status;
}

void gck_dynamo_restore(const gck_py *py, PyObject *before)
{
    gck_error error;
    PyObject *result;

    if (before == NULL) {
        return;
    }
    error = gck_error_take();
    result = PyObject_CallFunctionObjArgs(py->set_frame_callback, before, NULL);
    if (result == NULL) {
        PyErr_WriteUnraisable(before);
    }
    Py_XDECREF(result);
    gck_error_return(&error);
    Py_DECREF(before);
}

PyObject *gck_dynamo_method(const gck_py *py, PyMethodDef *method, PyObject *module)
{
    PyObject *builtin = PyCFunction_NewEx(method, module, NULL);
    PyObject *function = builtin != NULL ? PyObject_CallMethod(py->shim, "in_python", "O", builtin) : NULL;

    Py_XDECREF(builtin);
    return function;
}
