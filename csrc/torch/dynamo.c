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
    PyObject *type, *value, *traceback, *result;

    if (before == NULL) {
        return;
    }
    PyErr_Fetch(&type, &value, &traceback);
    result = PyObject_CallFunctionObjArgs(py->set_frame_callback, before, NULL);
    if (result == NULL) {
        PyErr_WriteUnraisable(before);
    }
    PyErr_Restore(type, value, traceback);
    Py_XDECREF(result);
    Py_DECREF(before);
}

PyObject *gck_dynamo_method(const gck_py *py, PyMethodDef *method, PyObject *module)
{
    PyObject *builtin = PyCFunction_NewEx(method, module, NULL);
    PyObject *function = builtin != NULL ? PyObject_CallMethod(py->shim, "in_python", "O", builtin) : NULL;

    Py_XDECREF(builtin);
    return function;
}
