/* error.c: the pending exception. */
#include "torch/error.h"

gck_error gck_error_take(void)
{
    gck_error e;

    PyErr_Fetch(&e.type, &e.value, &e.traceback);
    return e;
}

void gck_error_keep(gck_error *e)
{
    if (e->type == NULL) {
        *e = gck_error_take();
    } else if (PyErr_Occurred()) {
        PyErr_WriteUnraisable(NULL);
    }
}

void gck_error_drop(gck_error *e)
{
    Py_CLEAR(e->type);
    Py_CLEAR(e->value);
    Py_CLEAR(e->traceback);
}

int gck_error_return(gck_error *e)
{
    gck_error_keep(e);
    PyErr_Restore(e->type, e->value, e->traceback);
    return e->type != NULL ? -1 : 0;
}

PyObject *gck_error_object(void)
{
    gck_error e = gck_error_take();

    PyErr_NormalizeException(&e.type, &e.value, &e.traceback);
    if (e.traceback != NULL) {
        PyException_SetTraceback(e.value, e.traceback);
    }
    Py_XDECREF(e.type);
    Py_XDECREF(e.traceback);
    return e.value;
}

int gck_clear_attribute_error(void)
{
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

int gck_clear_refusal(void)
{
    const PyObject *type = PyErr_Occurred();

    if (type == PyExc_RuntimeError || type == PyExc_NotImplementedError || type == PyExc_TypeError) {
        PyErr_Clear();
        return 0;
    }
    return gck_clear_attribute_error();
}

void gck_error_report(void)
{
    if (PyErr_Occurred() && gck_clear_refusal() < 0) {
        PyErr_WriteUnraisable(NULL);
    }
}
