/* saved_held.c: what a node tells. */
#include "engine/saved/saved_held.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "engine/saved/saved_node.h"

#include <stdlib.h>

int64_t gck_product_of(PyObject *sizes)
{
    const Py_ssize_t n = sizes != NULL ? PySequence_Size(sizes) : -1;
    int64_t result = n < 0 ? -1 : 1;

    for (Py_ssize_t i = 0; i < n && result >= 0; i++) {
        const int64_t value = gck_as_int64(PySequence_GetItem(sizes, i));
        result = value < 0 ? -1 : result * value;
    }
    Py_XDECREF(sizes);
    return result;
}

int64_t gck_node_numel(const gck_py *py, PyObject *node, Py_ssize_t result)
{
    GCK_SCOPED PyObject *list = PyObject_GetAttr(node, py->names._input_metadata);
    GCK_SCOPED PyObject *each = list != NULL ? PySequence_GetItem(list, result) : NULL;
    return gck_product_of(each != NULL ? PyObject_GetAttr(each, py->names.shape) : NULL);
}

int gck_node_exponent(const gck_py *py, PyObject *node, double *exponent)
{
    GCK_SCOPED PyObject *value = PyObject_GetAttr(node, py->names._saved_exponent);

    *exponent = value != NULL ? PyFloat_AsDouble(value) : -1;
    return PyErr_Occurred() ? gck_clear_refusal() : 1;
}

/* *data: what a SavedTensor of torch's holds, taken over; NULL: it does not tell.  0 or -1. */
static int data_of(const gck_state *state, PyObject *raw, PyObject **data)
{
    *data = raw != NULL ? PyObject_GetAttr(raw, state->py.names.data) : NULL;
    Py_XDECREF(raw);
    return *data == NULL ? gck_clear_refusal() : 0;      /* it has no such argument here, or was freed */
}

int gck_node_held(const gck_state *state, PyObject *node, PyObject *attribute, PyObject **data)
{
    return data_of(state, PyObject_GetAttr(node, attribute), data);
}

/* New reference: what a hook of ours returned, which `data` is, or what other hooks made of it holds; NULL: neither, or
 * an exception.  data: taken over. */
static gck_saved_tensor *ours(const gck_state *state, PyObject *data)
{
    GCK_SCOPED PyObject *own = data, *inner = NULL;

    if (own == NULL || Py_TYPE(own) == state->SavedTensor) {
        return (gck_saved_tensor *)gck_give(&own);
    }
    if (own != Py_None && (inner = PyObject_GetAttr(own, state->py.names.packed)) == NULL) {
        gck_clear_refusal();
    }
    return inner != NULL && Py_TYPE(inner) == state->SavedTensor ? (gck_saved_tensor *)gck_give(&inner) : NULL;
}

PyObject *gck_function_saves(const gck_state *state, PyObject *node)
{
    /* These refer to the node's own memory, so none of them may live while Python runs. */
    GCK_SCOPED PyObject *raw = PyObject_GetAttr(node, state->py.names._raw_saved_tensors), *all = PyList_New(0);
    const Py_ssize_t n = raw != NULL ? PyTuple_Size(raw) : 0;
    int status = all == NULL ? -1 : raw == NULL ? gck_clear_refusal() : 0;

    for (Py_ssize_t place = 0; status == 0 && place < n; place++) {
        PyObject *data;
        status = data_of(state, Py_NewRef(PyTuple_GetItem(raw, place)), &data);
        status = status < 0 ? -1 : gck_append(all, data != NULL ? data : Py_NewRef(Py_None));
    }
    return status < 0 ? NULL : gck_give(&all);
}

gck_saved_tensor *gck_function_saved(const gck_state *state, PyObject *all, Py_ssize_t place)
{
    return place < PyList_Size(all) ? ours(state, Py_NewRef(PyList_GetItem(all, place))) : NULL;
}

gck_saved_tensor *gck_node_saved_as(const gck_state *state, PyObject *node, PyObject *attribute)
{
    PyObject *data;

    return gck_node_held(state, node, attribute, &data) < 0 ? NULL : ours(state, data);
}

gck_saved_tensor *gck_node_saved(const gck_state *state, PyObject *node, int kind, int n)
{
    PyObject *attribute = gck_saved_attribute(state, kind, n);
    GCK_SCOPED PyObject *all = attribute == NULL ? gck_function_saves(state, node) : NULL;
    return attribute != NULL ? gck_node_saved_as(state, node, attribute)
        : all != NULL ? gck_function_saved(state, all, strtol(gck_saved_row_of(kind, n)->argument, NULL, 10)) : NULL;
}

Py_ssize_t gck_function_place(const gck_state *state, PyObject *node, const gck_saved_tensor *packed)
{
    GCK_SCOPED PyObject *all = gck_function_saves(state, node);
    const Py_ssize_t n = all != NULL ? PyList_Size(all) : 0;
    Py_ssize_t found = all != NULL ? -1 : -2;

    for (Py_ssize_t place = 0; found == -1 && place < n; place++) {
        GCK_SCOPED gck_saved_tensor *saved = gck_function_saved(state, all, place);
        found = saved == packed ? place : saved == NULL && PyErr_Occurred() ? -2 : -1;
    }
    return found;
}
