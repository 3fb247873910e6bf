/* origin.c: where a saved tensor comes from, as far as a run of the region knows it. */
#include "engine/region/origin.h"

#include "torch/calls.h"
#include "torch/input.h"
#include "torch/tensor.h"
#include "engine/payload/layout.h"

#include <string.h>

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

/* Nodes of views, without "Backward": others are not asked for their base, which takes time. */
static const char *const views[] = {
    "Alias", "AsStrided", "Detach", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split",
    "Squeeze", "T", "Transpose", "Unbind", "Unfold", "Unsqueeze", "View",
};

/* 1 when tensors of this type of node may be views; 0; -1.  Types of torch's own nodes never die. */
static int makes_views(PyTypeObject *type)
{
    static struct { const PyTypeObject *type; int may; } known[64];
    const size_t at = ((uintptr_t)type >> 5) % (sizeof known / sizeof *known);
    int may = 0;

    if (known[at].type == type) {                /* faster */
        return known[at].may;
    }
    if (PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE) {          /* a Function of the user's may return its input */
        return 1;
    }
    GCK_SCOPED PyObject *name = PyType_GetName(type);
    const char *text = name != NULL ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    for (size_t i = 0; text != NULL && i < sizeof views / sizeof *views; i++) {
        may |= strncmp(text, views[i], strlen(views[i])) == 0;
    }
    if (text != NULL) {
        known[at].type = type;
        known[at].may = may;
    }
    return text != NULL ? may : -1;
}

static int know_leaf(PyObject *x, gck_origin *origin)
{
    origin->leaf = PyWeakref_NewRef(x, NULL);
    return origin->leaf != NULL ? 0 : -1;
}

/* x is a view of base.  0 or -1. */
static int know_base(const gck_py *py, const gck_dl_tensor *x, PyObject *base, gck_origin *origin)
{
    const int all = lies_alike(py, x, base), leaf = all < 0 ? -1 : gck_attr_is_true(base, py->names.is_leaf);
    GCK_SCOPED PyObject *node = leaf < 0 ? NULL : all && !leaf && origin->looked
                              ? PyObject_GetAttr(base, py->names.grad_fn) : Py_NewRef(Py_None);
    gck_dl_tensor whole;

    if (node == NULL) {
        return -1;
    }
    if (node != Py_None) {
        origin->through = Py_NewRef((PyObject *)Py_TYPE(node));
    }
    if (node != Py_None || !leaf) {
        return 0;
    }
    const int shown = gck_read_dlpack(py, base, &whole);
    const intptr_t offset = shown > 0 ? (intptr_t)x->data - (intptr_t)whole.data : -1;
    const int64_t bytes = shown > 0 ? gck_reach(whole.ndim, whole.shape, whole.strides) * whole.dtype.bits / 8 : 0;
    origin->offset = offset < bytes ? offset : -1;          /* else base has got other memory */
    if (all > 0) {                               /* what made the values is not known: a kept call hands out such */
        Py_CLEAR(origin->node);
    }
    return shown < 0 ? -1 : know_leaf(base, origin);
}

/* x may be a view: of all of an argument, of a result, or of a leaf.  0 or -1. */
static int know_view(const gck_py *py, const gck_run *run, PyObject *x, gck_origin *origin)
{
    GCK_SCOPED PyObject *base = PyObject_GetAttr(x, py->names._base);
    gck_dl_tensor at;
    int status = base == NULL ? -1 : base == Py_None ? 0 : gck_read_dlpack(py, x, &at);

    if (status > 0 && (status = gck_reach(at.ndim, at.shape, at.strides) > 0)) {       /* else it lies nowhere */
        for (int i = 0; run != NULL && status >= 0 && i < 2 * run->n; i++) {
            PyObject *given = gck_given(run, i / 2, i % 2);
            const int alike = given != NULL ? lies_alike(py, &at, given) : 0;
            origin->arguments |= (uint32_t)(alike > 0) << i / 2;
            status = alike < 0 ? -1 : 1;
        }
        if (status > 0 && origin->arguments == 0) {
            status = know_base(py, &at, base, origin);
        }
    }
    return status < 0 ? -1 : 0;
}

int gck_origin_of(const gck_py *py, const gck_run *run, int look, PyObject *x, gck_origin *origin, int *grad)
{
    const uint32_t arguments = gck_arguments_that_are(run, x);
    const int plain = gck_is_plain_tensor(py, x), leaf = plain && !look ? gck_attr_is_true(x, py->names.is_leaf) : 1;
    GCK_SCOPED PyObject *node = plain && look ? PyObject_GetAttr(x, py->names.grad_fn) : Py_NewRef(Py_None);
    const int made = node != Py_None || !leaf;   /* by a node */
    int status = node == NULL || leaf < 0 ? -1 : 0;

    *origin = (gck_origin){.arguments = arguments, .itself = arguments != 0, .looked = look};
    if (status == 0) {
        *grad = made ? 1 : gck_attr_is_true(x, py->names.requires_grad);
        status = *grad < 0 ? -1 : 0;
    }
    if (status == 0 && plain && (!made || arguments != 0)) {
        origin->constant = !*grad;
        status = (origin->constant && gck_version_of(py, x, &origin->version) < 0) || know_leaf(x, origin) < 0 ? -1 : 0;
    } else if (status == 0 && plain) {
        const int may = look ? makes_views(Py_TYPE(node)) : 1;
        if (look && (PyObject *)Py_TYPE(node) != py->error_node) {     /* else a restored argument without number */
            origin->node = Py_NewRef((PyObject *)Py_TYPE(node));
        }
        status = may <= 0 ? may : know_view(py, run, x, origin);
    }
    if (status < 0) {
        gck_origin_clear(origin);
    }
    return status;
}

/* Is it reshape()'s node of a view?  It depends on the dispatch modes of the run. */
static int is_reshape(PyObject *name)
{
    return PyUnicode_CompareWithASCIIString(name, "ReshapeAliasBackward0") == 0
        || PyUnicode_CompareWithASCIIString(name, "ViewBackward0") == 0;
}

/* 1, 0, or -1.  A class that the function makes anew in each run is another object of the same name.
 * Nodes of TorchScript's optimized graphs have one type for all operators. */
static int same_type(PyObject *a, PyObject *b)
{
    if (a == b || a == NULL || b == NULL) {
        return a == b;
    }
    GCK_SCOPED PyObject *left = PyType_GetName((PyTypeObject *)a), *right = PyType_GetName((PyTypeObject *)b);
    return left == NULL || right == NULL ? -1
         : PyUnicode_Compare(left, right) == 0 || PyUnicode_CompareWithASCIIString(left, "CppFunction") == 0
           || PyUnicode_CompareWithASCIIString(right, "CppFunction") == 0 || (is_reshape(left) && is_reshape(right));
}

int gck_origin_same(const gck_origin *then, const gck_origin *now)
{
    int same;

    if (then->arguments != 0 && now->arguments != 0) {
        return (then->arguments & now->arguments) != 0;
    }
    if (then->itself || now->itself) {           /* known as no argument where a node has made it */
        return (then->itself ? now : then)->node == NULL;
    }
    if (then->constant && now->node != NULL) {   /* the other way round the first call may have cached it */
        return 0;
    }
    if (then->node == NULL || now->node == NULL) {
        return 1;
    }
    same = same_type(then->node, now->node);
    if (same == 0 && then->through != NULL) {
        same = then->through == now->node || then->through == now->through;
    }
    return same != 0 ? same : now->through == then->node;
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
    int argument = -1;

    for (int i = GCK_GIVEN - 1; i >= 0; i--) {
        argument = origin->arguments >> i & 1 ? i : argument;
    }
    return name == NULL ? NULL : Py_BuildValue("(iNO)", argument, name, leaf != NULL ? leaf : Py_None);
}

void gck_origin_clear(gck_origin *origin)
{
    gck_origin old = *origin;

    *origin = (gck_origin){.node = NULL};
    Py_XDECREF(old.node);
    Py_XDECREF(old.through);
    Py_XDECREF(old.leaf);
}
