/* origin.c: walks back from a tensor through the nodes that neither compute nor mix. */
#include "origin.h"

#include <string.h>

enum { MAX_STEPS = 16 };               /* nodes between a weight and the view of it that is saved */

/* A value comes out of these as it went in, at another place or in another dtype. */
static const char *const views[] = {
    "AliasBackward0", "AsStridedBackward0", "CloneBackward0", "DiagonalBackward0", "ExpandBackward0",
    "PermuteBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0",
    "SplitWithSizesBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "TBackward0",
    "ToCopyBackward0", "TransposeBackward0", "UnbindBackward0", "UnfoldBackward0", "UnsafeViewBackward0",
    "UnsqueezeBackward0", "ViewBackward0", NULL,
};

/* Reductions without a dimension left to tell them by. */
static const char *const statistics[] = {
    "LinalgVectorNormBackward0", "NormBackward0", "NormBackward1", "NormBackward2", "NormBackward3", "StdBackward0",
    "StdMeanBackward0", "VarBackward0", "VarMeanBackward0", NULL,
};

/* One value for a row of them, when the last dimension is 1: what a norm divides by. */
static const char *const of_rows[] = {
    "DivBackward0", "MeanBackward0", "MeanBackward1", "PowBackward0", "ReciprocalBackward0", "RsqrtBackward0",
    "SqrtBackward0", "SumBackward0", "SumBackward1", NULL,
};

static const char *const compared[] = {
    "AmaxBackward0", "AminBackward0", "LogsumexpBackward0", "MaxBackward1", "MedianBackward0", "MinBackward1",
    "NanmedianBackward0", NULL,
};

static int is_one_of(const char *name, const char *const *names)
{
    while (*names != NULL && strcmp(name, *names) != 0) {
        names++;
    }
    return *names != NULL;
}

/* The name of its class in `name`, cut to its size.  0 or -1. */
static int name_of(PyObject *node, char *name, size_t size)
{
    PyObject *object = PyType_GetName(Py_TYPE(node));
    const char *text = object != NULL ? PyUnicode_AsUTF8AndSize(object, NULL) : NULL;

    name[0] = '\0';
    if (text != NULL) {
        strncat(name, text, size - 1);
    }
    Py_XDECREF(object);
    return text == NULL ? -1 : 0;
}

/* New reference: the node behind the first input; NULL without an exception: none there. */
static PyObject *first_input(PyObject *node)
{
    PyObject *edges = PyObject_GetAttrString(node, "next_functions"), *next = NULL;

    if (edges != NULL && PyTuple_Check(edges) && PyTuple_Size(edges) > 0) {
        next = PyTuple_GetItem(PyTuple_GetItem(edges, 0), 0);
        next = next == Py_None ? NULL : Py_XNewRef(next);
    }
    Py_XDECREF(edges);
    return next;
}

/* Address of the storage; NULL without an exception: it has none. */
static void *storage_of(PyObject *x)
{
    PyObject *storage = PyObject_CallMethod(x, "untyped_storage", NULL);
    PyObject *address = storage != NULL ? PyObject_CallMethod(storage, "data_ptr", NULL) : NULL;
    void *data = address != NULL ? PyLong_AsVoidPtr(address) : NULL;

    Py_XDECREF(storage);
    Py_XDECREF(address);
    PyErr_Clear();
    return data;
}

/* 1 when `next` is a leaf in whose memory x lies; 0; -1. */
static int is_leaf_of(PyObject *x, PyObject *next)
{
    PyObject *leaf;
    char name[64];
    void *storage;

    if (next == Py_None || name_of(next, name, sizeof name) < 0 || strcmp(name, "AccumulateGrad") != 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    leaf = PyObject_GetAttrString(next, "variable");
    storage = leaf != NULL ? storage_of(leaf) : NULL;
    Py_XDECREF(leaf);
    return leaf == NULL ? -1 : storage != NULL && storage == storage_of(x);
}

/* The same for any leaf that the node takes: a Function may hand out its weight. */
static int lies_in_leaf(PyObject *x, PyObject *node)
{
    PyObject *edges = PyObject_GetAttrString(node, "next_functions");
    int found = edges == NULL || !PyTuple_Check(edges) ? -1 : 0;

    for (Py_ssize_t i = 0; found == 0 && i < PyTuple_Size(edges); i++) {
        found = is_leaf_of(x, PyTuple_GetItem(PyTuple_GetItem(edges, i), 0));
    }
    Py_XDECREF(edges);
    return found;
}

PyObject *gck_origin_saved(PyObject *x, const char *name)
{
    PyObject *node = PyObject_GetAttrString(x, "grad_fn");
    PyObject *saved = node != NULL ? PyObject_GetAttrString(node, name) : NULL;
    PyObject *data = saved != NULL ? PyObject_GetAttrString(saved, "data") : NULL;

    PyErr_Clear();
    Py_XDECREF(node);
    Py_XDECREF(saved);
    return data;
}

/* 1: the node is saving its result at this moment; 0: it did before, or has freed it; -1:
 * this torch does not tell. */
static int is_saving_result(PyObject *node)
{
    PyObject *saved = PyObject_GetAttrString(node, "_raw_saved_result");
    PyObject *data = saved != NULL ? PyObject_GetAttrString(saved, "data") : NULL;
    PyObject *value = data == Py_None ? PyObject_CallMethod(saved, "unpack", NULL) : NULL;
    const int result = data == NULL ? -1 : value == Py_None;     /* freed: unpack() raises */

    PyErr_Clear();
    Py_XDECREF(saved);
    Py_XDECREF(data);
    Py_XDECREF(value);
    return result;
}

/* 1 when this is another output than the first; 0; -1. */
static int is_side_output(PyObject *x)
{
    PyObject *value = PyObject_GetAttrString(x, "output_nr");
    const long nr = value != NULL ? PyLong_AsLong(value) : -1;

    Py_XDECREF(value);
    return nr < 0 ? -1 : nr > 0;
}

/* 1 when each row of x is one value; 0; -1. */
static int has_rows_of_one(PyObject *x)
{
    PyObject *shape = PyObject_GetAttrString(x, "shape");
    const Py_ssize_t ndim = shape != NULL && PyTuple_Check(shape) ? PyTuple_Size(shape) : 0;
    const long last = ndim > 0 ? PyLong_AsLong(PyTuple_GetItem(shape, ndim - 1)) : 0;

    Py_XDECREF(shape);
    return PyErr_Occurred() ? -1 : last == 1;
}

/* x comes out of `node` after `steps` views. */
static int classify(PyObject *x, PyObject *node, const char *name, int steps)
{
    int answer;

    if (strcmp(name, "LogSoftmaxBackward0") == 0) {
        return GCK_ORIGIN_LOG;
    }
    if (strcmp(name, "ReluBackward0") == 0 && steps == 0) {
        answer = is_saving_result(node);
        return answer < 0 ? GCK_ORIGIN_STATISTIC : answer ? GCK_ORIGIN_SIGNS : GCK_ORIGIN_VALUES;
    }
    if (is_one_of(name, compared)) {
        return steps == 0 && is_saving_result(node) ? GCK_ORIGIN_COMPARED : GCK_ORIGIN_STATISTIC;
    }
    if (is_one_of(name, statistics)) {
        return GCK_ORIGIN_STATISTIC;
    }
    answer = is_one_of(name, of_rows) ? has_rows_of_one(x)
        : steps == 0 && (strstr(name, "Norm") != NULL || strstr(name, "Attention") != NULL) ? is_side_output(x) : 0;
    if (answer == 0 && (answer = lies_in_leaf(x, node)) == 1) {
        return GCK_ORIGIN_LEAF;
    }
    return answer < 0 ? -1 : answer ? GCK_ORIGIN_STATISTIC : GCK_ORIGIN_VALUES;
}

int gck_origin_of(PyObject *x)
{
    PyObject *node = PyObject_GetAttrString(x, "grad_fn");
    char name[64];
    int strided = 0, origin = -1;

    for (int steps = 0; node != NULL && origin < 0; steps++) {
        if (node == Py_None || name_of(node, name, sizeof name) < 0) {
            origin = node == Py_None ? GCK_ORIGIN_VALUES : -1;
            break;
        }
        if (strcmp(name, "AccumulateGrad") == 0) {
            origin = GCK_ORIGIN_LEAF;
        } else if (steps < MAX_STEPS && is_one_of(name, views)) {
            PyObject *next = first_input(node);
            strided |= strcmp(name, "AsStridedBackward0") == 0;
            Py_DECREF(node);
            node = next;
        } else {
            origin = classify(x, node, name, steps);
        }
    }
    Py_XDECREF(node);
    if (origin < 0 && !PyErr_Occurred()) {
        origin = GCK_ORIGIN_VALUES;              /* the views begin at a tensor without a node */
    }
    /* So autograd shows a view that was changed in place: what made its values is hidden. */
    return origin == GCK_ORIGIN_VALUES && strided ? GCK_ORIGIN_STATISTIC : origin;
}
