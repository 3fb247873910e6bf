/* origin.c: where a saved tensor comes from, as far as a run of the region knows it. */
#include "engine/region/origin.h"

#include "torch/calls.h"
#include "torch/input.h"

/* ---- arguments ---- */

static void give(gck_given *given, PyObject *x)
{
    if (PyTuple_Check(x)) {                      /* no other container owns its items for as long as the call runs */
        for (Py_ssize_t i = 0; i < PyTuple_Size(x); i++) {
            give(given, PyTuple_GetItem(x, i));
        }
    } else if (given->n < GCK_GIVEN) {
        given->x[given->n++] = x;
    }
}

void gck_given_of(gck_given *given, PyObject *args, PyObject *kwargs)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;

    given->n = 0;
    give(given, args);
    while (kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value)) {
        give(given, value);
    }
}

static int number_of(const gck_given *given, const PyObject *x)
{
    int found = GCK_NO_ARGUMENT;

    for (int i = 0; i < given->n; i++) {
        if (given->x[i] == x) {
            found = found == GCK_NO_ARGUMENT ? i : GCK_SOME_ARGUMENT;
        }
    }
    return found;
}

/* ---- the others ---- */

/* Types of torch's own nodes, which never die, whose results are no views: such a result is not asked
 * for its base. */
enum { KINDS = 64 };
static const PyObject *no_views[KINDS];

/* x may be a view of a parameter: then say of which, and where in it.  0 or -1. */
static int find_parameter(const gck_py *py, PyObject *x, gck_origin *origin)
{
    const PyObject **known = &no_views[((uintptr_t)origin->node >> 5) % KINDS];
    gck_dl_tensor whole, part;
    PyObject *base;

    if (*known == origin->node) {                /* faster */
        return 0;
    }
    base = PyObject_GetAttr(x, py->names._base);
    if (base == Py_None && !(PyType_GetFlags((PyTypeObject *)origin->node) & Py_TPFLAGS_HEAPTYPE)) {
        *known = origin->node;
    }
    if (base != NULL && (PyObject *)Py_TYPE(base) == py->Parameter && gck_read_dlpack(py, base, &whole) > 0
        && gck_read_dlpack(py, x, &part) > 0) {
        origin->offset = (int64_t)((intptr_t)part.data - (intptr_t)whole.data) + (int64_t)part.byte_offset
                       - (int64_t)whole.byte_offset;
        origin->leaf = PyWeakref_NewRef(base, NULL);
    }
    Py_XDECREF(base);
    return PyErr_Occurred() ? -1 : 0;
}

int gck_origin_of(const gck_py *py, const gck_given *given, PyObject *x, gck_origin *origin, int *grad)
{
    const int argument = given != NULL ? number_of(given, x) : GCK_NO_ARGUMENT;
    const int plain = (PyObject *)Py_TYPE(x) == py->Tensor || (PyObject *)Py_TYPE(x) == py->Parameter;
    PyObject *node = plain ? PyObject_GetAttr(x, py->names.grad_fn) : NULL;
    int status = plain && node == NULL ? -1 : 0;

    *origin = (gck_origin){.argument = argument};
    if (grad != NULL && status == 0) {           /* faster: one question for two */
        *grad = node != NULL && node != Py_None ? 1 : gck_attr_is_true(x, py->names.requires_grad);
        status = *grad < 0 ? -1 : 0;
    }
    if (status == 0 && node == Py_None && argument == GCK_NO_ARGUMENT) {
        origin->leaf = PyWeakref_NewRef(x, NULL);
        status = origin->leaf != NULL ? 0 : -1;
    } else if (status == 0 && node != NULL && node != Py_None && (PyObject *)Py_TYPE(node) != py->error_node) {
        origin->node = Py_NewRef((PyObject *)Py_TYPE(node));         /* error_node: of a restored argument */
        status = argument == GCK_NO_ARGUMENT ? find_parameter(py, x, origin) : 0;
    }
    Py_XDECREF(node);
    if (status < 0) {
        gck_origin_clear(origin);
    }
    return status;
}

/* 1, 0, or -1.  A class that the function makes anew in each run is another object of the same name. */
static int same_type(PyObject *a, PyObject *b)
{
    PyObject *left, *right;
    int same;

    if (a == b) {
        return 1;
    }
    left = PyType_GetName((PyTypeObject *)a);
    right = PyType_GetName((PyTypeObject *)b);
    same = left == NULL || right == NULL ? -1 : PyUnicode_Compare(left, right) == 0;
    Py_XDECREF(left);
    Py_XDECREF(right);
    return same;
}

int gck_origin_same(const gck_origin *then, const gck_origin *now)
{
    const int given_then = then->argument != GCK_NO_ARGUMENT, given_now = now->argument != GCK_NO_ARGUMENT;

    if (given_then && given_now) {
        return then->argument == now->argument || then->argument == GCK_SOME_ARGUMENT
            || now->argument == GCK_SOME_ARGUMENT;
    }
    if (given_now) {                             /* no argument then; known only where a node had made it */
        return then->node == NULL;
    }
    /* An argument then that is none now: the function may have it from elsewhere, too. */
    return then->node == NULL || now->node == NULL ? 1 : same_type(then->node, now->node);
}

PyObject *gck_origin_leaf(const gck_origin *origin)
{
    PyObject *leaf = origin->leaf != NULL ? PyWeakref_GetObject(origin->leaf) : NULL;

    return leaf != Py_None ? leaf : NULL;
}

PyObject *gck_origin_describe(const gck_origin *origin)
{
    PyObject *name = origin->node != NULL ? PyType_GetName((PyTypeObject *)origin->node) : Py_NewRef(Py_None);
    PyObject *leaf = gck_origin_leaf(origin);

    return name == NULL ? NULL : Py_BuildValue("(iNO)", origin->argument, name, leaf != NULL ? leaf : Py_None);
}

void gck_origin_clear(gck_origin *origin)
{
    gck_origin old = *origin;

    *origin = (gck_origin){.argument = GCK_NO_ARGUMENT};
    Py_XDECREF(old.node);
    Py_XDECREF(old.leaf);
}
