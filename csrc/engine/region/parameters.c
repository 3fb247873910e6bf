/* parameters.c: the module behind a function, and its parameters. */
#include "engine/region/parameters.h"

#include "torch/calls.h"
#include "torch/error.h"

enum { MAX_KNOWN = 4096 };         /* dead modules leave entries behind: the table is cleared then */

/* *x becomes its attribute, NULL where it has none.  1, 0 or -1. */
static int step_to(PyObject **x, PyObject *name)
{
    GCK_SCOPED PyObject *of = *x;
    PyObject *value = *x = PyObject_GetAttr(of, name);

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
    GCK_SCOPED PyObject *key = PyLong_FromVoidPtr(x);
    int known = key != NULL ? PyDict_Contains(seen, key) : -1;

    if (known == 0 && PyDict_SetItem(seen, key, x) < 0) {
        known = -1;
    }
    return known;
}

/* New reference: the values of an attribute that is a dict, as a list, because a question about a
 * value runs Python, which may change the dict. */
static PyObject *values_of(PyObject *module, PyObject *name)
{
    GCK_SCOPED PyObject *dict = PyObject_GetAttr(module, name);
    return dict != NULL ? PyMapping_Values(dict) : NULL;
}

/* Add a module and those inside it, each once, in the order of Module.modules().  0 or -1. */
static int collect(const gck_py *py, PyObject *module, PyObject *list, PyObject *seen)
{
    const int known = module == Py_None ? 1 : see(seen, module);
    GCK_SCOPED PyObject *children = known == 0 && PyList_Append(list, module) == 0
                                  ? values_of(module, py->names._modules) : NULL;
    int status = known > 0 ? 0 : children == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; children != NULL && status == 0 && i < PyList_Size(children); i++) {
        status = collect(py, PyList_GetItem(children, i), list, seen);
    }
    return status;
}

PyObject *gck_modules_of(const gck_py *py, PyObject *roots)
{
    GCK_SCOPED PyObject *list = PyList_New(0), *seen = PyDict_New();
    int status = list == NULL || seen == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(roots); i++) {
        status = collect(py, PyList_GetItem(roots, i), list, seen);
    }
    return status < 0 ? NULL : gck_give(&list);
}

/* Add the parameters that a module has itself.  0 or -1. */
static int add_own(const gck_py *py, PyObject *module, PyObject *list, PyObject *seen)
{
    GCK_SCOPED PyObject *values = values_of(module, py->names._parameters);
    int status = values == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(values); i++) {
        PyObject *value = PyList_GetItem(values, i);
        const int known = value == Py_None ? 1 : see(seen, value);
        const int grad = known < 0 ? -1 : known ? 0 : gck_attr_is_true(value, py->names.requires_grad);
        status = grad > 0 ? PyList_Append(list, value) : grad;
    }
    return status;
}

PyObject *gck_parameters_of(const gck_py *py, PyObject *module)
{
    GCK_SCOPED PyObject *list = PyList_New(0), *seen = list != NULL ? PyDict_New() : NULL;
    GCK_SCOPED PyObject *roots = seen != NULL ? Py_BuildValue("[O]", module) : NULL;
    GCK_SCOPED PyObject *modules = roots != NULL ? gck_modules_of(py, roots) : NULL;
    int status = modules == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(modules); i++) {
        status = add_own(py, PyList_GetItem(modules, i), list, seen);
    }
    return status < 0 ? NULL : gck_give(&list);
}

int gck_known(PyObject *known, PyObject *x)
{
    GCK_SCOPED PyObject *key = PyLong_FromVoidPtr(x);
    PyObject *reference = key != NULL ? PyDict_GetItemWithError(known, key) : NULL;            /* borrowed */

    gck_error_report();
    return reference != NULL && PyWeakref_GetObject(reference) == x;
}

void gck_remember(PyObject *known, PyObject *x)
{
    GCK_SCOPED PyObject *key = PyLong_FromVoidPtr(x), *reference = PyWeakref_NewRef(x, NULL);

    if (PyDict_Size(known) >= MAX_KNOWN) {
        PyDict_Clear(known);
    }
    if (key != NULL && reference != NULL) {
        PyDict_SetItem(known, key, reference);
    }
    gck_error_report();                          /* not remembered: checked again next time */
}

/* Replace each value of the dict that is not a `kind` by kind(value), and a plain OrderedDict by
 * its subclass `type`, which does the same with later values.  No other thread runs in between. */
PyObject *gck_guard_hooks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *hooks, *type, *kind, *key, *hook;

    if (!PyArg_ParseTuple(args, "O!O!O:guard_hooks", &PyDict_Type, &hooks, &PyType_Type, &type, &kind)) {
        return NULL;
    }
    if (Py_TYPE(hooks) == PyType_GetSlot((PyTypeObject *)type, Py_tp_base)) {
        Py_INCREF(type);                         /* as for any instance of a type made at run time */
        Py_SET_TYPE(hooks, (PyTypeObject *)type);
    }
    GCK_SCOPED PyObject *items = PyDict_Items(hooks);
    for (Py_ssize_t i = 0; items != NULL && i < PyList_Size(items); i++) {
        GCK_SCOPED PyObject *guarded = NULL;
        if (PyArg_ParseTuple(PyList_GetItem(items, i), "OO", &key, &hook) && (PyObject *)Py_TYPE(hook) != kind) {
            guarded = PyObject_CallFunctionObjArgs(kind, hook, NULL);
        }
        /* Skip it if it was removed meanwhile. */
        if (guarded != NULL && PyDict_GetItemWithError(hooks, key) == hook) {
            PyDict_SetItem(hooks, key, guarded);
        }
        if (PyErr_Occurred()) {
            return NULL;
        }
    }
    return items == NULL ? NULL : Py_NewRef(Py_None);
}
