/* input_aliasing.c: arguments of a compressed region that share memory. */
#include "engine/payload/input_aliasing.h"

#include "torch/calls.h"

int gck_input_aliasing_add(PyObject **rows, gck_py *py, gck_input *in, PyObject *fed, PyObject *payload)
{
    int64_t version;

    if (gck_version_of(py, fed, &version) < 0 || (*rows == NULL && (*rows = PyList_New(0)) == NULL)) {
        return -1;
    }
    return gck_append(*rows, Py_BuildValue("(OOOL)", in->x, fed, payload != NULL ? payload : Py_None,
                                           (long long)version));
}

/* No call here runs Python, so borrowed references stay valid. */
PyObject *gck_input_aliasing_find(PyObject *rows, const gck_input *in, PyObject **fed)
{
    PyObject *row, *payload = Py_None, *same = NULL;

    for (Py_ssize_t i = 0; rows != NULL && payload == Py_None && i < PyList_Size(rows); i++) {
        row = PyList_GetItem(rows, i);
        if (PyTuple_GetItem(row, 0) == in->x) {
            payload = PyTuple_GetItem(row, 2);
            same = PyTuple_GetItem(row, 1);
        }
    }
    if (payload == Py_None) {
        return NULL;
    }
    *fed = Py_NewRef(same);
    return Py_NewRef(payload);
}

/* Row i: 1 when it was written to since; 0; -1. */
static int is_changed(const gck_py *py, PyObject *rows, Py_ssize_t i)
{
    GCK_SCOPED PyObject *row = PySequence_GetItem(rows, i);
    PyObject *x, *fed, *payload;
    long long version;
    int64_t now;

    return row == NULL || !PyArg_ParseTuple(row, "OOOL", &x, &fed, &payload, &version)
        || gck_version_of(py, fed, &now) < 0 ? -1 : now != version;
}

int gck_input_aliasing_check(PyObject *rows, const gck_py *py)
{
    const Py_ssize_t n = rows != NULL ? PyList_Size(rows) : 0;
    int changed = 0;                             /* versions report more than is needed: views share one */

    for (Py_ssize_t i = 0; i < n && changed == 0; i++) {
        changed = is_changed(py, rows, i);
    }
    if (changed > 0) {
        changed = gck_done(PyObject_CallFunction(py->call.check_aliases, "O", rows));
    }
    return changed;
}
