/* parameters.c: the module behind a function, and its parameters. */
#include "parameters.h"

PyObject *gck_module_behind(const gck_py *py, PyObject *function)
{
    PyObject *owner;

    while (PyObject_IsInstance(function, py->partial) == 1) {
        PyObject *inner = PyObject_GetAttrString(function, "func");
        if (inner == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_DECREF(inner);                        /* the partial holds it */
        function = inner;
    }
    if (PyObject_IsInstance(function, py->Module) == 1) {
        return function;
    }
    owner = PyObject_GetAttrString(function, "__self__");
    PyErr_Clear();
    Py_XDECREF(owner);                           /* the method holds it */
    return owner != NULL && PyObject_IsInstance(owner, py->Module) == 1 ? owner : NULL;
}

/* Those of module and its children that require grad, each once.  0 or -1. */
static int collect_parameters(const gck_py *py, PyObject *module, PyObject *list, PyObject *seen)
{
    static const char *const names[] = {"_parameters", "_modules"};

    for (int k = 0; k < 2; k++) {
        PyObject *dict = PyObject_GetAttrString(module, names[k]), *value;
        Py_ssize_t at = 0;
        int status = dict != NULL && PyDict_Check(dict) ? 0 : -1;
        while (status == 0 && PyDict_Next(dict, &at, NULL, &value)) {
            if (value == Py_None || (status = PySet_Contains(seen, value)) != 0) {
                status = status > 0 ? 0 : status;
                continue;
            }
            status = PySet_Add(seen, value);
            if (status == 0 && k == 1) {
                status = collect_parameters(py, value, list, seen);
            } else if (status == 0) {
                const int grad = gck_attr_is_true(value, py->names.requires_grad);
                status = grad > 0 ? PyList_Append(list, value) : grad;
            }
        }
        Py_XDECREF(dict);
        if (status < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *gck_parameters_of(const gck_py *py, PyObject *module)
{
    PyObject *list = PyList_New(0), *seen = PySet_New(NULL);

    if (list == NULL || seen == NULL || (module != NULL && collect_parameters(py, module, list, seen) < 0)) {
        Py_CLEAR(list);
    }
    Py_XDECREF(seen);
    return list;
}

