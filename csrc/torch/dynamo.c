/* dynamo.c: this thread's hook that passes frames to torch.compile. */
#include "torch/dynamo.h"

#include "torch/calls.h"
#include "torch/error.h"

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

    if (before == NULL) {
        return;
    }
    error = gck_error_take();
    if (gck_done(PyObject_CallFunctionObjArgs(py->set_frame_callback, before, NULL)) < 0) {
        PyErr_WriteUnraisable(before);
    }
    gck_error_return(&error);
    Py_DECREF(before);
}
