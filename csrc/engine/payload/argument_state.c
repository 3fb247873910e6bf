/* argument_state.c: attributes of tensors and of containers. */
#include "engine/payload/argument_state.h"

#include "torch/calls.h"
#include "torch/tensor.h"

enum { DEEP = 100 };

int gck_attributes_read(const gck_py *py, PyObject *x, PyObject **found)
{
    GCK_SCOPED PyObject *attributes = PyObject_GenericGetDict(x, NULL);
    int status = attributes != NULL ? 0 : -1;

    *found = NULL;
    if (status == 0 && PyDict_Size(attributes) > 0) {
        *found = PyObject_CallFunctionObjArgs(py->call.plain_attributes, attributes, NULL);
        status = *found == NULL ? -1 : *found == Py_None;
        if (status > 0) {
            Py_CLEAR(*found);
        }
    }
    return status;
}

int gck_attributes_give(PyObject *x, PyObject *given)
{
    GCK_SCOPED PyObject *attributes = given != NULL ? PyObject_GenericGetDict(x, NULL) : NULL;
    return given == NULL ? 0 : attributes == NULL ? -1 : PyDict_Update(attributes, given);
}

int gck_attributes_carry(const gck_py *py, PyObject *from, PyObject *to)
{
    if (!gck_is_plain_tensor(py, from) || !gck_is_plain_tensor(py, to)) {
        return 0;
    }
    GCK_SCOPED PyObject *attributes = PyObject_GenericGetDict(from, NULL);
    return attributes == NULL ? -1 : PyDict_Size(attributes) > 0 ? gck_attributes_give(to, attributes) : 0;
}

/* No Python runs, so borrowed references stay valid. */
static int may_have_state(const gck_py *py, PyObject *x, int depth)
{
    const int tuple = PyTuple_CheckExact(x), list = PyList_CheckExact(x);
    const Py_ssize_t n = tuple ? PyTuple_Size(x) : list ? PyList_Size(x) : 0;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int found = depth > DEEP;

    for (Py_ssize_t i = 0; !found && i < n; i++) {
        found = may_have_state(py, tuple ? PyTuple_GetItem(x, i) : PyList_GetItem(x, i), depth + 1);
    }
    if (PyDict_CheckExact(x)) {
        while (!found && PyDict_Next(x, &at, &key, &value)) {
            found = may_have_state(py, value, depth + 1);
        }
        return found;
    }
    return found || !(tuple || list || x == Py_None || gck_is_plain_tensor(py, x) || PyLong_CheckExact(x)
                      || PyFloat_CheckExact(x) || PyUnicode_CheckExact(x) || PyBool_Check(x));
}

int gck_container_may_have_state(const gck_py *py, PyObject *x) { return may_have_state(py, x, 0); }

int gck_container_state_read(const gck_py *py, PyObject *x, int only_plain, PyObject **found)
{
    int status;

    *found = PyObject_CallFunction(py->call.container_state, "Oi", x, only_plain);
    status = *found == NULL ? -1 : *found == Py_None;
    if (status > 0 || (status == 0 && PyObject_Size(*found) == 0)) {
        Py_CLEAR(*found);
    }
    return status;
}

int gck_container_state_give(const gck_py *py, PyObject *x, PyObject *state)
{
    return state == NULL ? 0
         : gck_done(PyObject_CallFunctionObjArgs(py->call.give_container_state, x, state, NULL));
}
