/* origin.c: where a saved tensor comes from, as far as a run of the region knows it. */
#include "engine/region/origin.h"

#include "torch/calls.h"
#include "torch/input.h"
#include "engine/payload/layout.h"

/* 1 when y, a tensor, has the values of x, which lies there; 0; -1. */
static int lies_alike(const gck_py *py, const gck_dl_tensor *x, PyObject *y)
{
    gck_dl_tensor at;
    const int shown = gck_is_plain_tensor(py, y) ? gck_read_dlpack(py, y, &at) : 0;
    int alike = shown > 0 && x->data == at.data && x->byte_offset == at.byte_offset && x->ndim == at.ndim
             && x->dtype.code == at.dtype.code && x->dtype.bits == at.dtype.bits;

    for (int d = 0; alike && d < x->ndim; d++) {
        alike = x->shape[d] == at.shape[d] && x->strides[d] == at.strides[d];
    }
    return shown < 0 ? -1 : alike;
}

/* 1 when an argument begins in the memory of x, which lies there: it may be a view of x in the forward,
 * but never of what is restored; 0; -1. */
static int holds_argument(const gck_py *py, const gck_run *run, const gck_dl_tensor *x)
{
    const int64_t bytes = gck_reach(x->ndim, x->shape, x->strides) * x->dtype.bits / 8;
    gck_dl_tensor at;
    int holds = 0;

    for (int i = 0; run != NULL && holds == 0 && i < run->n; i++) {
        const int shown = gck_is_plain_tensor(py, run->given[i]) ? gck_read_dlpack(py, run->given[i], &at) : 0;
        holds = shown < 0 ? -1 : shown && (intptr_t)at.data - (intptr_t)x->data >= 0
                              && (intptr_t)at.data - (intptr_t)x->data < bytes;
    }
    return holds;
}

/* Types of torch's own nodes, which never die, whose results are no views: such a result is not asked
 * for its base. */
enum { KINDS = 64 };
static const PyObject *no_views[KINDS];

/* New reference: the base of x, which this node made; None for no view. */
static PyObject *base_of(const gck_py *py, PyObject *x, PyObject *node)
{
    PyTypeObject *type = Py_TYPE(node);
    const PyObject **known = &no_views[((uintptr_t)type >> 5) % KINDS];
    PyObject *base;

    if (*known == (PyObject *)type) {            /* faster */
        return Py_NewRef(Py_None);
    }
    base = PyObject_GetAttr(x, py->names._base);
    if (base == Py_None && !(PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE)) {
        *known = (PyObject *)type;
    }
    return base;
}

static int know_leaf(PyObject *x, gck_origin *origin)
{
    origin->leaf = PyWeakref_NewRef(x, NULL);
    return origin->leaf != NULL ? 0 : -1;
}

static int know_node(const gck_py *py, PyObject *node, gck_origin *origin)
{
    if ((PyObject *)Py_TYPE(node) != py->error_node) {         /* else a restored argument that has no number */
        origin->node = Py_NewRef((PyObject *)Py_TYPE(node));
    }
    return 0;
}

/* x is a view: of all of an argument or of its base, which has the same values, or of a part of a
 * parameter.  0 or -1. */
static int know_view(const gck_py *py, const gck_run *run, PyObject *x, PyObject *node, PyObject *base,
                     gck_origin *origin)
{
    gck_dl_tensor at, whole;
    PyObject *of;
    int alike = 0, status;

    if (gck_read_dlpack(py, x, &at) <= 0) {
        return PyErr_Occurred() ? -1 : know_node(py, node, origin);
    }
    if (gck_reach(at.ndim, at.shape, at.strides) == 0) {       /* it lies nowhere */
        return 0;
    }
    for (int i = 0; run != NULL && alike == 0 && i < run->n; i++) {
        alike = lies_alike(py, &at, run->given[i]);
        if (alike > 0) {
            origin->argument = gck_argument_number(run, run->given[i]);
            alike = know_leaf(run->given[i], origin) < 0 || know_node(py, node, origin) < 0 ? -1 : 1;
        }
    }
    if (alike != 0) {
        return alike < 0 ? -1 : 0;
    }
    alike = lies_alike(py, &at, base);
    if (alike > 0 && (status = holds_argument(py, run, &at)) != 0) {
        return status < 0 ? -1 : know_node(py, node, origin);
    }
    if (alike <= 0) {
        if (alike == 0 && (PyObject *)Py_TYPE(base) == py->Parameter && gck_read_dlpack(py, base, &whole) > 0) {
            origin->offset = (int64_t)((intptr_t)at.data - (intptr_t)whole.data);
            alike = know_leaf(base, origin);
        }
        return alike < 0 || PyErr_Occurred() ? -1 : know_node(py, node, origin);
    }
    of = PyObject_GetAttr(base, py->names.grad_fn);
    status = of == NULL ? -1 : of == Py_None ? know_leaf(base, origin) : know_node(py, of, origin);
    Py_XDECREF(of);
    return status;
}

int gck_origin_of(const gck_py *py, const gck_run *run, PyObject *x, gck_origin *origin, int *grad)
{
    const int argument = gck_argument_number(run, x);
    const int plain = gck_is_plain_tensor(py, x);
    PyObject *node = plain ? PyObject_GetAttr(x, py->names.grad_fn) : Py_NewRef(Py_None), *base;
    int status = node == NULL ? -1 : 0;

    *origin = (gck_origin){.argument = argument};
    if (status == 0) {
        *grad = node != Py_None ? 1 : gck_attr_is_true(x, py->names.requires_grad);
        status = *grad < 0 ? -1 : 0;
    }
    if (status == 0 && plain) {
        if (node == Py_None || argument != GCK_NO_ARGUMENT) {
            origin->constant = !*grad;
            status = know_leaf(x, origin);
        } else if ((base = base_of(py, x, node)) == NULL) {
            status = -1;
        } else {
            status = base == Py_None ? know_node(py, node, origin) : know_view(py, run, x, node, base, origin);
            Py_DECREF(base);
        }
    }
    Py_XDECREF(node);
    if (status < 0) {
        gck_origin_clear(origin);
    }
    return status;
}

int gck_origin_is_original(const gck_py *py, const gck_origin *then, PyObject *x)
{
    PyObject *original = then->argument != GCK_NO_ARGUMENT ? gck_origin_leaf(then) : NULL;
    gck_dl_tensor at;
    int shown;

    if (original == NULL || original == x || !gck_is_plain_tensor(py, x)) {
        return original != NULL && original == x;
    }
    shown = gck_read_dlpack(py, x, &at);
    return shown > 0 ? lies_alike(py, &at, original) : shown;
}

/* 1, 0, or -1.  A class that the function makes anew in each run is another object of the same name.
 * Nodes of TorchScript's optimized graphs have one type for all operators. */
static int same_type(PyObject *a, PyObject *b)
{
    PyObject *left, *right;
    int same;

    if (a == b) {
        return 1;
    }
    left = PyType_GetName((PyTypeObject *)a);
    right = PyType_GetName((PyTypeObject *)b);
    same = left == NULL || right == NULL ? -1
         : PyUnicode_Compare(left, right) == 0 || PyUnicode_CompareWithASCIIString(left, "CppFunction") == 0
           || PyUnicode_CompareWithASCIIString(right, "CppFunction") == 0;
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
    if ((given_then && then->node == NULL) || (given_now && now->node == NULL)) {
        return (given_then ? now : then)->node == NULL;         /* known as no argument where a node has made it */
    }
    if (then->constant && now->node != NULL) {   /* the other way round the first call may have cached it */
        return 0;
    }
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
