/* leaves.c: what goes into a region and comes out of it. */
#include "leaves.h"

#include <stdlib.h>

static int any_container(gck_py *py, PyObject *args)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++) {
        PyObject *x = PyTuple_GetItem(args, i);
        if (PyTuple_Check(x) || PyList_Check(x) || PyDict_Check(x)) {
            return 1;
        }
        const int known = gck_is_tensor(py, x) > 0 ? 0 : PyDict_Contains(py->supported_nodes, (PyObject *)Py_TYPE(x));
        if (known != 0) {
            PyErr_Clear();
            return known > 0;
        }
    }
    return 0;
}

PyObject *gck_leaves_flatten(gck_py *py, PyObject *args, PyObject *kwargs, PyObject **spec)
{
    PyObject *leaves = NULL, *both, *flat = NULL;

    *spec = NULL;
    if (kwargs == NULL && !any_container(py, args)) {
        return PySequence_List(args);
    }
    both = Py_BuildValue("(ON)", args, kwargs ? Py_NewRef(kwargs) : PyDict_New());
    if (both != NULL) {
        flat = PyObject_CallFunctionObjArgs(py->tree_flatten, both, NULL);
    }
    if (flat != NULL && PyArg_ParseTuple(flat, "O!O", &PyList_Type, &leaves, spec)) {
        Py_INCREF(leaves);
        Py_INCREF(*spec);
    }
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

PyObject *gck_leaves_tensors(gck_py *py, PyObject *out, gck_frame *noted)
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
    if (noted != NULL && (noted->tensor_at = calloc((size_t)PyList_Size(leaves) + 1, 1)) == NULL) {
        PyErr_NoMemory();
        status = -1;
    }
    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);
        const int tensor = gck_is_tensor(py, leaf);
        status = tensor > 0 ? PyList_Append(tensors, leaf) : tensor;
        if (status == 0 && tensor && noted != NULL) {
            noted->tensor_at[i] = 1;
            status = PyList_SetItem(leaves, i, Py_NewRef(Py_None));   /* takes over the reference */
        }
    }
    if (status == 0 && noted != NULL) {
        noted->outputs = Py_NewRef(flat);
    }
    result = status == 0 ? PyList_AsTuple(tensors) : NULL;
    Py_DECREF(flat);
    Py_DECREF(tensors);
    return result;
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

