/* calls.c: the results of Python calls, as C values. */
#include "torch/calls.h"

#include "torch/error.h"

int gck_done(PyObject *result)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

int gck_is_true(PyObject *value)
{
    const int truth = value == NULL ? -1 : value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);

    Py_XDECREF(value);
    return truth;
}

int gck_attr_is_true(PyObject *x, PyObject *name) { return gck_is_true(PyObject_GetAttr(x, name)); }

int gck_ask(PyObject *getter) { return gck_is_true(PyObject_CallNoArgs(getter)); }

Py_ssize_t gck_items(PyObject *x) { return PyTuple_Check(x) ? PyTuple_Size(x) : PyList_Check(x) ? PyList_Size(x) : 0; }

PyObject *gck_item(PyObject *x, Py_ssize_t i)
{
    return PyTuple_Check(x) ? PyTuple_GetItem(x, i) : PyList_GetItem(x, i);
}

int gck_each_item(PyObject *x, int (*visit)(void *with, PyObject *item), void *with)
{
    int result = 0;

    if (!PyTuple_Check(x) && !PyList_Check(x)) {
        return visit(with, x);
    }
    for (Py_ssize_t i = 0; result == 0 && i < gck_items(x); i++) {
        GCK_SCOPED PyObject *item = Py_NewRef(gck_item(x, i));
        result = gck_each_item(item, visit, with);
    }
    return result;
}

int gck_append(PyObject *list, PyObject *item)
{
    const int status = item == NULL ? -1 : PyList_Append(list, item);

    Py_XDECREF(item);
    return status;
}

void gck_add_item(PyObject **list, PyObject *item)
{
    if (gck_append(*list, item) < 0) {
        Py_CLEAR(*list);
    }
}

void gck_set_item(PyObject **dict, const char *key, PyObject *value)
{
    if (*dict != NULL && (value == NULL || PyDict_SetItemString(*dict, key, value) < 0)) {
        Py_CLEAR(*dict);
    }
    Py_XDECREF(value);
}

int64_t gck_as_int64(PyObject *value)
{
    const int64_t number = value != NULL ? PyLong_AsLongLong(value) : -1;

    Py_XDECREF(value);
    return number;
}

PyObject *gck_as_tuple(PyObject *list)
{
    PyObject *tuple = list != NULL ? PyList_AsTuple(list) : NULL;

    Py_XDECREF(list);
    return tuple;
}

PyObject *gck_invoke(PyObject *function, PyObject *args)
{
    PyObject *result = args != NULL ? PyObject_CallObject(function, args) : NULL;

    Py_XDECREF(args);
    return result;
}

PyObject *gck_method(PyObject *of, const char *name, PyObject *args)
{
    GCK_SCOPED PyObject *method = args != NULL ? PyObject_GetAttrString(of, name) : NULL;
    PyObject *result = method != NULL ? PyObject_CallObject(method, args) : NULL;

    Py_XDECREF(args);
    return result;
}

PyObject *gck_optional_attribute(PyObject *x, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(x, name);

    if (value == NULL) {
        gck_clear_attribute_error();
    }
    return value;
}

int gck_has_attribute(PyObject *x, const char *name)
{
    GCK_SCOPED PyObject *value = PyObject_GetAttrString(x, name);

    return value == NULL ? gck_clear_attribute_error() : 1;
}

PyObject *gck_tuple(PyObject *const *objects, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);

    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        PyTuple_SetItem(tuple, i, Py_NewRef(objects[i]));
    }
    return tuple;
}
