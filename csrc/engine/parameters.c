/* parameters.c: the module behind a function, and its parameters. */
#include "parameters.h"

enum { MAX_KNOWN = 4096 };         /* dead modules leave entries behind: start afresh then */

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
    owner = PyObject_GetAttr(function, py->names.__self__);
    PyErr_Clear();
    Py_XDECREF(owner);                           /* the method holds it */
    return owner != NULL && PyObject_IsInstance(owner, py->Module) == 1 ? owner : NULL;
}

/* Those of module and its children that require grad, each once.  0 or -1. */
static int collect_parameters(const gck_py *py, PyObject *module, PyObject *list, PyObject *seen)
{
    PyObject *const names[] = {py->names._parameters, py->names._modules};

    for (int k = 0; k < 2; k++) {
        PyObject *dict = PyObject_GetAttr(module, names[k]), *value;
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


int gck_module_known(PyObject *known, PyObject *function)
{
    PyObject *key = PyLong_FromVoidPtr(function);
    PyObject *reference = key != NULL ? PyDict_GetItemWithError(known, key) : NULL;            /* borrowed */

    Py_XDECREF(key);
    PyErr_Clear();
    return reference != NULL && PyWeakref_GetObject(reference) == function;
}

int gck_module_remember(const gck_state *state, PyObject *known, PyObject *function)
{
    const int module = PyObject_IsInstance(function, state->py.Module);
    PyObject *key, *reference;

    if (module <= 0) {
        return module;
    }
    if (PyDict_Size(known) >= MAX_KNOWN) {
        PyDict_Clear(known);
    }
    key = PyLong_FromVoidPtr(function);
    reference = PyWeakref_NewRef(function, NULL);
    if (key != NULL && reference != NULL) {
        PyDict_SetItem(known, key, reference);
    }
    Py_XDECREF(key);
    Py_XDECREF(reference);
    PyErr_Clear();                               /* not remembered: asked again next time */
    return 0;
}
