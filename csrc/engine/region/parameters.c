/* parameters.c: the module behind a function, and its parameters. */
#include "engine/region/parameters.h"

#include "torch/calls.h"
#include "torch/error.h"

enum { MAX_KNOWN = 4096 };         /* dead modules leave entries behind: the table is cleared then */

/* *x becomes its attribute, NULL where it has none.  1, 0 or -1. */
static int step_to(PyObject **x, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(*x, name);

    Py_DECREF(*x);
    *x = value;
    return value != NULL ? 1 : gck_clear_attribute_error();
}

int gck_module_behind(const gck_py *py, PyObject *function, PyObject **module)
{
    int is = PyObject_IsInstance(*module = Py_NewRef(function), py->partial);

    while (is > 0 && (is = step_to(module, py->names.func)) > 0) {
        is = PyObject_IsInstance(*module, py->partial);
    }
    if (is == 0 && *module != NULL && (is = PyObject_IsInstance(*module, py->Module)) == 0
        && (is = step_to(module, py->names.__self__)) > 0) {
        is = PyObject_IsInstance(*module, py->Module);
    }
    if (is <= 0) {
        Py_CLEAR(*module);
    }
    return is < 0 ? -1 : 0;
}

/* 1 when the object was seen before: by identity, since a module need not be hashable; 0; -1. */
static int see(PyObject *seen, PyObject *x)
{
    PyObject *key = PyLong_FromVoidPtr(x);
    int known = key != NULL ? PyDict_Contains(seen, key) : -1;

    if (known == 0 && PyDict_SetItem(seen, key, x) < 0) {
        known = -1;
    }
    Py_XDECREF(key);
    return known;
}

/* New reference: the values of an attribute that is a dict, as a list, because a question about a
 * value runs Python, which may change the dict. */
static PyObject *values_of(PyObject *module, PyObject *name)
{
    PyObject *dict = PyObject_GetAttr(module, name);
    PyObject *values = dict != NULL ? PyMapping_Values(dict) : NULL;

    Py_XDECREF(dict);
    return values;
}

/* Collect the parameters of module and its children that require grad, each once.  0 or -1. */
static int collect_parameters(const gck_py *py, PyObject *module, PyObject *list, PyObject *seen)
{
    PyObject *const names[] = {py->names._parameters, py->names._modules};
    int status = 0;

    for (int k = 0; k < 2 && status == 0; k++) {
        PyObject *values = values_of(module, names[k]);
        status = values == NULL ? -1 : 0;
        for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(values); i++) {
            PyObject *value = PyList_GetItem(values, i);
            const int known = value == Py_None ? 1 : see(seen, value);
            if (known != 0) {
                status = known < 0 ? -1 : 0;
            } else if (k == 1) {
                status = collect_parameters(py, value, list, seen);
            } else {
                const int grad = gck_attr_is_true(value, py->names.requires_grad);
                status = grad > 0 ? PyList_Append(list, value) : grad;
            }
        }
        Py_XDECREF(values);
    }
    return status;
}

PyObject *gck_modules_of(const gck_py *py, PyObject *roots)
{
    PyObject *list = PyList_New(0), *seen = PyDict_New(), *next = Py_NewRef(roots);
    int status = list == NULL || seen == NULL ? -1 : 0;

    /* `next`: the roots, then the children of list[0], of list[1] and so on. */
    for (Py_ssize_t parent = 0; status == 0; parent++) {
        for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(next); i++) {
            PyObject *module = PyList_GetItem(next, i);
            const int known = module == Py_None ? 1 : see(seen, module);
            status = known != 0 ? (known < 0 ? -1 : 0) : PyList_Append(list, module);
        }
        Py_CLEAR(next);
        if (status < 0 || parent == PyList_Size(list)) {
            break;
        }
        status = (next = values_of(PyList_GetItem(list, parent), py->names._modules)) == NULL ? -1 : 0;
    }
    Py_XDECREF(next);
    Py_XDECREF(seen);
    if (status < 0) {
        Py_CLEAR(list);
    }
    return list;
}

PyObject *gck_parameters_of(const gck_py *py, PyObject *module)
{
    PyObject *list = PyList_New(0), *seen = PyDict_New();

    if (list == NULL || seen == NULL || collect_parameters(py, module, list, seen) < 0) {
        Py_CLEAR(list);
    }
    Py_XDECREF(seen);
    return list;
}

int gck_known(PyObject *known, PyObject *x)
{
    PyObject *key = PyLong_FromVoidPtr(x);
    PyObject *reference = key != NULL ? PyDict_GetItemWithError(known, key) : NULL;            /* borrowed */

    Py_XDECREF(key);
    gck_error_report();
    return reference != NULL && PyWeakref_GetObject(reference) == x;
}

int gck_remember(PyObject *known, PyObject *x)
{
    PyObject *key = PyLong_FromVoidPtr(x), *reference = PyWeakref_NewRef(x, NULL);

    if (PyDict_Size(known) >= MAX_KNOWN) {
        PyDict_Clear(known);
    }
    if (key != NULL && reference != NULL) {
        PyDict_SetItem(known, key, reference);
    }
    Py_XDECREF(key);
    Py_XDECREF(reference);
    gck_error_report();                          /* not remembered: checked again next time */
    return 0;
}

/* Replace each value of the dict that is not a `kind` by kind(value), and a plain OrderedDict by
 * its subclass `type`, which does the same with later values.  No other thread runs in between. */
PyObject *gck_guard_hooks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *hooks, *type, *kind, *items, *key, *hook;

    if (!PyArg_ParseTuple(args, "O!O!O:guard_hooks", &PyDict_Type, &hooks, &PyType_Type, &type, &kind)) {
        return NULL;
    }
    if (Py_TYPE(hooks) == PyType_GetSlot((PyTypeObject *)type, Py_tp_base)) {
        Py_INCREF(type);                         /* as for any instance of a type made at run time */
        Py_SET_TYPE(hooks, (PyTypeObject *)type);
    }
    items = PyDict_Items(hooks);
    for (Py_ssize_t i = 0; items != NULL && i < PyList_Size(items); i++) {
        PyObject *guarded = NULL;
        if (PyArg_ParseTuple(PyList_GetItem(items, i), "OO", &key, &hook) && (PyObject *)Py_TYPE(hook) != kind) {
            guarded = PyObject_CallFunctionObjArgs(kind, hook, NULL);
        }
        /* Skip it if it was removed meanwhile. */
        if (guarded != NULL && PyDict_GetItemWithError(hooks, key) == hook) {
            PyDict_SetItem(hooks, key, guarded);
        }
        Py_XDECREF(guarded);
        if (PyErr_Occurred()) {
            Py_CLEAR(items);
        }
    }
    Py_XDECREF(items);
    return items == NULL ? NULL : Py_NewRef(Py_None);
}
