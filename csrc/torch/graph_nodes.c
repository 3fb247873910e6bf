/* graph_nodes.c: numbers of autograd's nodes. */
#include "torch/graph_nodes.h"

int64_t gck_last_node_number(const gck_py *py)
{
    PyObject *value = PyObject_CallNoArgs(py->next_node_number);
    const int64_t next = value != NULL ? PyLong_AsLongLong(value) : 0;

    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : next - 1;
}

int64_t gck_node_number(const gck_py *py, PyObject *node)
{
    PyObject *value = PyObject_CallMethodObjArgs(node, py->names._sequence_nr, NULL);
    const uint64_t number = value != NULL ? PyLong_AsUnsignedLongLong(value) : 0;

    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : number > INT64_MAX ? INT64_MAX : (int64_t)number;
}
