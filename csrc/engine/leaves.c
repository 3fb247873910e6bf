/* leaves.c: what goes into a region and comes out of it. */
#include "leaves.h"

#include <stdlib.h>

static int any_container(gck_py *py, PyObject *const *args, Py_ssize_t nargs)
{
    for (Py_ssize_t i = 0; i < nargs; i++) {
        if (PyTuple_Check(args[i]) || PyList_Check(args[i]) || PyDict_Check(args[i])) {
            return 1;
        }
        const int known = gck_is_tensor(py, args[i]) > 0 ? 0 : PyDict_Contains(py->supported_nodes,
                                                                              (PyObject *)Py_TYPE(args[i]));
        if (known != 0) {
            PyErr_Clear();
            return known > 0;
        }
    }
    return 0;
}

PyObject *gck_leaves_flatten(gck_py *py, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs, PyObject **spec)
{
    PyObject *tuple = gck_tuple(args, nargs), *leaves = NULL, *both = NULL, *flat = NULL;

    *spec = NULL;
    if (tuple == NULL) {
        return NULL;
    }
    if (kwargs == NULL && !any_container(py, args, nargs)) {
        leaves = PySequence_List(tuple);
    } else if ((both = Py_BuildValue("(ON)", tuple, kwargs ? Py_NewRef(kwargs) : PyDict_New())) != NULL) {
        flat = PyObject_CallFunctionObjArgs(py->tree_flatten, both, NULL);
        if (flat != NULL && PyArg_ParseTuple(flat, "O!O", &PyList_Type, &leaves, spec)) {
            Py_INCREF(leaves);
            Py_INCREF(*spec);
        }
    }
    Py_XDECREF(tuple);
    Py_XDECREF(both);
    Py_XDECREF(flat);
    return leaves;
}

PyObject *gck_leaves_call(gck_frame *frame, PyObject *leaves)
{
    PyObject *args = NULL, *kwargs = NULL, *both = NULL, *result = NULL;

    if (frame->spec == NULL) {
        args = PyList_AsTuple(leaves);
        result = args != NULL ? PyObject_Call(frame->function, args, NULL) : NULL;
        Py_XDECREF(args);
        return result;
    }
    both = PyObject_CallFunctionObjArgs(frame->state->py.tree_unflatten, leaves, frame->spec, NULL);
    if (both != NULL && PyArg_ParseTuple(both, "OO", &args, &kwargs)) {
        result = PyObject_Call(frame->function, args, kwargs);
    }
    Py_XDECREF(both);
    return result;
}

PyObject *gck_leaves_tensors(gck_py *py, PyObject *out, PyObject **rest)
{
    PyObject *flat, *leaves, *spec, *tensors = NULL, *result = NULL;
    const int single = gck_is_tensor(py, out);

    if (single != 0) {
        return single < 0 ? NULL : PyTuple_Pack(1, out);
    }
    flat = PyObject_CallFunctionObjArgs(py->tree_flatten, out, NULL);
    if (flat == NULL || !PyArg_ParseTuple(flat, "O!O", &PyList_Type, &leaves, &spec)
        || (tensors = PyList_New(0)) == NULL) {
        Py_XDECREF(flat);
        return NULL;
    }
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);
        const int tensor = gck_is_tensor(py, leaf);
        status = tensor > 0 ? PyList_Append(tensors, leaf) : tensor;
        if (status == 0 && tensor) {
            status = PyList_SetItem(leaves, i, Py_NewRef(Py_None));   /* takes over the reference */
        }
    }
    if (status == 0 && rest != NULL) {
        *rest = Py_NewRef(flat);
    }
    result = status == 0 ? PyList_AsTuple(tensors) : NULL;
    Py_DECREF(flat);
    Py_DECREF(tensors);
    return result;
}

int gck_leaves_note(gck_frame *frame, PyObject *out)
{
    PyObject *leaves, *spec;

    if (frame->outputs == NULL) {
        return 0;
    }
    if (!PyArg_ParseTuple(frame->outputs, "OO", &leaves, &spec)) {
        return -1;
    }
    PyObject *flat = PyObject_CallFunctionObjArgs(frame->state->py.tree_flatten, out, NULL);
    PyObject *whole = flat != NULL ? PyTuple_GetItem(flat, 0) : NULL;
    const Py_ssize_t n = PyList_Size(leaves);
    frame->tensor_at = calloc((size_t)n + 1, 1);
    for (Py_ssize_t i = 0; whole != NULL && frame->tensor_at != NULL && i < n; i++) {
        frame->tensor_at[i] = gck_is_tensor(&frame->state->py, PyList_GetItem(whole, i)) > 0;
    }
    Py_XDECREF(flat);
    return whole == NULL || frame->tensor_at == NULL ? -1 : 0;
}

PyObject *gck_leaves_assemble(gck_frame *frame, PyObject *tensors)
{
    PyObject *leaves, *spec, *list, *result = NULL;
    Py_ssize_t next = 0;

    if (frame->outputs == NULL) {
        return PySequence_GetItem(tensors, 0);
    }
    if (!PyArg_ParseTuple(frame->outputs, "OO", &leaves, &spec) || (list = PySequence_List(leaves)) == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(list) && next < PySequence_Size(tensors); i++) {
        if (frame->tensor_at[i]) {
            PyList_SetItem(list, i, PySequence_GetItem(tensors, next++));
        }
    }
    result = PyObject_CallFunctionObjArgs(frame->state->py.tree_unflatten, list, spec, NULL);
    Py_DECREF(list);
    return result;
}

