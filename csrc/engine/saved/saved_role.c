/* saved_role.c: finds the form that suffices for the node which saves a tensor. */
#include "engine/saved/saved_role.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "engine/saved/saved_tensor.h"

#include <string.h>

enum { MAX_STEPS = 16 };           /* the most nodes between a weight and the saved view of it */

void gck_saved_as_clear(gck_saved_as *as)
{
    as->codec = NULL;
    Py_CLEAR(as->part);
    Py_CLEAR(as->rows);
    Py_CLEAR(as->again);
}

gck_saved_formats gck_saved_formats_of(const gck_codec *codec)
{
    gck_saved_formats formats;

    for (int f = 0; f < GCK_NFAMILIES; f++) {
        formats.of[f] = codec;
    }
    formats.of[GCK_SOFTMAX] = gck_codec_find("bf16");
    formats.of[GCK_LOG_SOFTMAX] = gck_codec_find("fp16");
    return formats;
}

/* ---- conditions ---- */

/* The memory of x, without a question; 0: it has none. */
static int look(gck_state *state, const gck_input *in, gck_tensor *view)
{
    const int reason = gck_view_of(&state->py, in->x, view);

    return reason < 0 ? -1 : reason == GCK_COMPRESS;
}

/* An int among a node's attributes; -1 with an exception. */
static int64_t int_of(PyObject *node, const char *name)
{
    PyObject *value = PyObject_GetAttrString(node, name);
    const int64_t number = value != NULL ? PyLong_AsLongLong(value) : -1;

    Py_XDECREF(value);
    return number;
}

/* The product of a sequence of ints, taken over; -1 with an exception. */
static int64_t product(PyObject *sizes)
{
    const Py_ssize_t n = sizes != NULL ? PySequence_Size(sizes) : -1;
    int64_t result = n < 0 ? -1 : 1;

    for (Py_ssize_t i = 0; i < n && result >= 0; i++) {
        PyObject *size = PySequence_GetItem(sizes, i);
        const int64_t value = size != NULL ? PyLong_AsLongLong(size) : -1;
        Py_XDECREF(size);
        result = value < 0 ? -1 : result * value;
    }
    Py_XDECREF(sizes);
    return result;
}

int64_t gck_node_numel(const gck_py *py, PyObject *node, Py_ssize_t result)
{
    PyObject *list = PyObject_GetAttr(node, py->names._input_metadata);
    PyObject *each = list != NULL ? PySequence_GetItem(list, result) : NULL;
    PyObject *shape = each != NULL ? PyObject_GetAttr(each, py->names.shape) : NULL;

    Py_XDECREF(each);
    Py_XDECREF(list);
    return product(shape);
}

/* 1 when a factor has as many values as the product.  Of an expanded one only one value counts. */
static int is_whole_factor(gck_state *state, PyObject *node, const gck_tensor *view)
{
    int64_t values = 1, whole;

    for (int d = 0; d < view->ndim; d++) {
        values *= view->steps == NULL || view->steps[d] != 0 ? view->sizes[d] : 1;
    }
    whole = gck_node_numel(&state->py, node, 0);
    return whole < 0 ? -1 : values >= whole;
}

/* The values of a row: those of the last dimension, of images those of one image. */
static int64_t row_of(const gck_tensor *view)
{
    return view->ndim > 3 ? view->numel / (view->sizes[0] > 0 ? view->sizes[0] : 1)
         : view->ndim > 0 ? view->sizes[view->ndim - 1] : 1;
}

int gck_node_exponent(const gck_py *py, PyObject *node, double *exponent)
{
    PyObject *value = PyObject_GetAttr(node, py->names._saved_exponent);

    *exponent = value != NULL ? PyFloat_AsDouble(value) : -1;
    Py_XDECREF(value);
    return PyErr_Occurred() ? gck_clear_refusal() : 1;
}

/* 1 when the exponent is 2, 3 or 4. */
static int is_small_power(const gck_py *py, PyObject *node)
{
    double exponent;
    const int real = gck_node_exponent(py, node, &exponent);

    return real <= 0 ? real : exponent == 2 || exponent == 3 || exponent == 4;
}

/* 1 when alpha, or without it beta, is 1. */
static int has_unit_scale(PyObject *node)
{
    const int alpha = gck_has_attribute(node, "_saved_alpha");
    PyObject *value = alpha < 0 ? NULL : PyObject_GetAttrString(node, alpha ? "_saved_alpha" : "_saved_beta");
    const double scale = value != NULL ? PyFloat_AsDouble(value) : -1;

    Py_XDECREF(value);
    return PyErr_Occurred() ? gck_clear_refusal() : scale == 1;
}

/* 1 when no row can spoil another: none shares a group with another, or all are of like size. */
static int has_like_rows(gck_state *state, PyObject *node, const gck_input *in, int device)
{
    const int shape = gck_has_attribute(node, "_saved_normalized_shape");
    int64_t values, groups;

    if (shape < 0) {
        return -1;
    }
    if (shape) {
        values = product(PyObject_GetAttrString(node, "_saved_normalized_shape"));
    } else {
        const int64_t channels = int_of(node, "_saved_C"), plane = channels < 0 ? -1 : int_of(node, "_saved_HxW");
        groups = plane < 0 ? -1 : int_of(node, "_saved_group");
        values = groups <= 0 ? -1 : channels * plane / groups;
    }
    return values < 0 ? (PyErr_Occurred() ? -1 : 0) : values % GCK_GROUP == 0 ? 1 : device >= 0 || values < 32 ? 0
         : gck_is_true(PyObject_CallFunction(state->py.call.rows_are_alike, "OOL", node, in->x, (long long)values));
}

/* ---- forms ---- */

/* Encode `method`(*args) of the detached tensor in its place, because grad mode may be on.  0 or
 * -1. */
static int take_part(gck_state *state, const gck_input *in, const char *codec, const char *method, PyObject *args,
                     gck_saved_as *as)
{
    PyObject *plain = args != NULL ? PyObject_CallMethodObjArgs(in->x, state->py.names.detach, NULL) : NULL;

    if (plain == NULL) {
        Py_XDECREF(args);
        return -1;
    }
    as->part = gck_method(plain, method, args);
    as->codec = codec != NULL ? gck_codec_find(codec) : as->codec;
    Py_DECREF(plain);
    return as->part == NULL ? -1 : 0;
}

/* Clamp the values where a group of the codec holds several rows, because one row may be much
 * larger. */
static int cut(gck_state *state, const gck_input *in, const gck_tensor *view, gck_saved_as *as)
{
    return row_of(view) % GCK_GROUP == 0 ? 0
         : take_part(state, in, NULL, "clamp", Py_BuildValue("(ii)", -20, 20), as);
}

/* New reference: the node's dimension.  Torch shows -1 as 2^64 - 1. */
static PyObject *dimension_of(PyObject *node)
{
    PyObject *value = PyObject_GetAttrString(node, "_saved_dim");
    const long long dim = value != NULL ? (long long)PyLong_AsUnsignedLongLongMask(value) : -1;

    Py_XDECREF(value);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(dim);
}

/* *data: what the node holds as this argument, Py_None where it holds nothing; NULL: it does not tell.
 * 0 or -1. */
static int held(const gck_state *state, PyObject *node, PyObject *attribute, PyObject **data)
{
    PyObject *raw = PyObject_GetAttr(node, attribute);

    *data = raw != NULL ? PyObject_GetAttr(raw, state->py.names.data) : NULL;
    Py_XDECREF(raw);
    return *data == NULL ? gck_clear_refusal() : 0;      /* it has no such argument here, or was freed */
}

gck_saved_tensor *gck_node_saved(const gck_state *state, PyObject *node, PyObject *attribute)
{
    PyObject *data, *inner = NULL;

    if (held(state, node, attribute, &data) < 0 || data == NULL) {
        return NULL;
    }
    if (Py_TYPE(data) == state->SavedTensor) {
        return (gck_saved_tensor *)data;
    }
    if (data != Py_None && (inner = PyObject_GetAttr(data, state->py.names.packed)) == NULL) {
        gck_clear_refusal();
    }
    Py_DECREF(data);
    if (inner != NULL && Py_TYPE(inner) != state->SavedTensor) {
        Py_CLEAR(inner);
    }
    return (gck_saved_tensor *)inner;
}

/* 1 when the attention's result is not kept, but made again; 0, -1. */
static int is_made_again(const gck_state *state, PyObject *node)
{
    gck_saved_tensor *saved = state->nodes_tell ? gck_node_saved(state, node, state->py.names._raw_saved_output) : NULL;
    const int again = saved != NULL ? saved->form.entry.kind == GCK_PACKED_OBJECT : PyErr_Occurred() ? -1 : 0;

    Py_XDECREF((PyObject *)saved);
    return again;
}

/* Find out how the node's results are made again, and make its log-sum-exp one that is.  0, for then they
 * have no codec; or -1. */
static int make_again(const gck_state *state, PyObject *node, gck_saved_as *as)
{
    PyObject *made = state->nodes_tell ? PyObject_CallFunctionObjArgs(state->py.call.attention_again, node, NULL)
                                       : Py_NewRef(Py_None);
    PyObject *result, *sums, *make_sums;
    const int parsed = made == NULL || (made != Py_None && !PyArg_ParseTuple(made, "OO!O", &result, state->SavedTensor,
                                                                            &sums, &make_sums)) ? -1 : made != Py_None;

    if (parsed > 0) {
        as->again = Py_NewRef(result);
        gck_saved_form_make_again(&((gck_saved_tensor *)sums)->form, make_sums);
    }
    Py_XDECREF(made);
    return parsed < 0 ? -1 : 0;
}

/* 1 when its shape and place decide. */
static int reads_view(gck_role role)
{
    return role != GCK_ROLE_VALUES && role != GCK_ROLE_ROUNDED && role != GCK_ROLE_PROBABILITIES
        && role != GCK_ROLE_POWER && role != GCK_ROLE_ATTENTION && role != GCK_ROLE_AGAIN;
}

/* The form of a tensor with this role.  0 or -1, and *as is then empty. */
static int form_of(gck_state *state, const gck_saved_formats *formats, const gck_saved_row *row, PyObject *node,
                   gck_input *in, gck_saved_as *as)
{
    gck_tensor view = {.ndim = 0};
    int holds = reads_view(row->role) ? look(state, in, &view) : 1;

    if (holds <= 0) {
        return holds;
    }
    as->codec = row->family < GCK_NFAMILIES ? formats->of[row->family] : NULL;
    if (row->family < GCK_NFAMILIES && as->codec == NULL) {
        return 0;
    }
    switch (row->role) {
    case GCK_ROLE_VALUES:
    case GCK_ROLE_ROUNDED:
        break;
    case GCK_ROLE_PROBABILITIES:
        holds = as->codec->max_error == 0 ? 1 : (as->rows = dimension_of(node)) == NULL ? -1 : 1;
        break;
    case GCK_ROLE_FACTOR:
        holds = is_whole_factor(state, node, &view);
        break;
    case GCK_ROLE_POWER:
        holds = is_small_power(&state->py, node);
        break;
    case GCK_ROLE_CUT:
        holds = cut(state, in, &view, as) < 0 ? -1 : 1;
        break;
    case GCK_ROLE_CUT_OF_ONE:
        holds = has_unit_scale(node);
        holds = holds <= 0 ? holds : look(state, in, &view);
        holds = holds <= 0 ? holds : cut(state, in, &view, as) < 0 ? -1 : 1;
        break;
    case GCK_ROLE_ROWS:
        holds = has_like_rows(state, node, in, view.device);
        break;
    case GCK_ROLE_PLANES:
        holds = view.ndim > 1 && view.numel >= GCK_GROUP * view.sizes[1];
        break;
    case GCK_ROLE_ATTENTION:
        holds = as->codec->max_error == 0 ? 1 : is_made_again(state, node);
        break;
    case GCK_ROLE_AGAIN:
        holds = as->codec->max_error == 0 ? 1 : make_again(state, node, as);
        break;
    case GCK_ROLE_POSITIVE:
        holds = take_part(state, in, "mask", "gt", Py_BuildValue("(i)", 0), as) < 0 ? -1 : 1;
        break;
    case GCK_ROLE_POSITIVE_OR_NAN:
        holds = take_part(state, in, "mask", "le", Py_BuildValue("(i)", 0), as) < 0
             || gck_done(PyObject_CallMethod(as->part, "logical_not_", NULL)) < 0 ? -1 : 1;
        break;
    }
    if (holds <= 0) {
        Py_CLEAR(as->part);
        Py_CLEAR(as->rows);
        as->codec = NULL;
    }
    return holds < 0 ? -1 : 0;
}

/* ---- which of them is it ---- */

int gck_saved_as_input(gck_state *state, const gck_saved_formats *formats, PyObject *node, PyObject *packed,
                       gck_input *in, gck_saved_as *as)
{
    const int kind = gck_node_kind(state, node);
    PyObject *attribute = NULL;
    const gck_saved_row *row, *first = NULL;

    for (int i = kind; i >= 0 && (row = gck_saved_row_of(state, i, &attribute)) != NULL; i++) {
        int found = !state->nodes_tell;            /* then the node's name alone decides */
        first = first == NULL ? row : first;
        if (strcmp(row->node, first->node) != 0) {
            break;
        }
        if (gck_saved_row_is_result(row)) {
            continue;
        }
        if (!found) {
            PyObject *saved = (PyObject *)gck_node_saved(state, node, attribute);
            found = saved != NULL ? saved == packed : PyErr_Occurred() ? -1 : 0;
            Py_XDECREF(saved);
        }
        if (found != 0) {
            return found < 0 ? -1 : form_of(state, formats, row, node, in, as);
        }
    }
    return kind < GCK_NODE_LEAF ? -1 : 0;
}

/* 1 when the node has no such result yet: it is about to be saved; 0, -1. */
static int is_open(const gck_state *state, PyObject *node, PyObject *attribute)
{
    PyObject *data, *name, *value;
    int open = 1;

    if (!state->nodes_tell) {
        return 1;
    }
    if (held(state, node, attribute, &data) < 0) {
        return -1;
    }
    open = data == Py_None;
    Py_XDECREF(data);
    if (open) {
        name = PyUnicode_Substring(attribute, 4, PyUnicode_GetLength(attribute));
        value = name != NULL ? PyObject_GetAttr(node, name) : NULL;
        open = value == Py_None;
        Py_XDECREF(name);
        Py_XDECREF(value);
        return value == NULL ? gck_clear_refusal() : open;
    }
    return 0;
}

int gck_saved_as_result(gck_state *state, const gck_saved_formats *formats, PyObject *node, gck_input *in,
                        gck_saved_as *as)
{
    const int kind = gck_node_kind(state, node);
    PyObject *attribute = NULL;
    const gck_saved_row *row, *first = NULL;

    for (int i = kind; i >= 0 && (row = gck_saved_row_of(state, i, &attribute)) != NULL; i++) {
        first = first == NULL ? row : first;
        if (strcmp(row->node, first->node) != 0) {
            break;
        }
        const int open = gck_saved_row_is_result(row) ? is_open(state, node, attribute) : 0;
        if (open != 0) {
            return open < 0 ? -1 : form_of(state, formats, row, node, in, as);
        }
    }
    return kind < GCK_NODE_LEAF ? -1 : 0;
}

/* ---- is it a weight ---- */

/* New reference: the node behind a node's first edge, Py_None where nothing is behind it. */
static PyObject *behind(const gck_py *py, PyObject *node)
{
    PyObject *edges = PyObject_GetAttr(node, py->names.next_functions);
    PyObject *first = edges == NULL ? NULL : Py_NewRef(PyTuple_Size(edges) > 0
                                                       ? PyTuple_GetItem(PyTuple_GetItem(edges, 0), 0) : Py_None);

    Py_XDECREF(edges);
    return first;
}

/* 1 when x shares its storage with a leaf that goes into this node, a user's Function; 0, -1. */
static int shares_with_leaf(gck_state *state, PyObject *x, PyObject *node)
{
    PyObject *edges = PyObject_GetAttr(node, state->py.names.next_functions);
    const void *own = NULL, *of_leaf;
    int shares = edges == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; shares == 0 && i < PyTuple_Size(edges); i++) {
        PyObject *next = PyTuple_GetItem(PyTuple_GetItem(edges, i), 0), *leaf;
        const int kind = next != Py_None ? gck_node_kind(state, next) : GCK_NODE_OTHER;
        if (kind != GCK_NODE_LEAF) {
            shares = kind < GCK_NODE_LEAF ? -1 : 0;
            continue;
        }
        leaf = PyObject_GetAttrString(next, "variable");
        of_leaf = NULL;
        shares = leaf == NULL || (own == NULL && gck_storage_of(&state->py, x, &own) < 0)
              || gck_storage_of(&state->py, leaf, &of_leaf) < 0 ? -1 : of_leaf != NULL && of_leaf == own;
        Py_XDECREF(leaf);
    }
    Py_XDECREF(edges);
    return shares;
}

int gck_lies_in_leaf(gck_state *state, PyObject *x, PyObject *node)
{
    int kind = GCK_NODE_VIEW;

    Py_INCREF(node);
    for (int step = 0; step <= MAX_STEPS && (kind = gck_node_kind(state, node)) == GCK_NODE_VIEW; step++) {
        PyObject *next = step < MAX_STEPS ? behind(&state->py, node) : NULL;
        if (next == NULL || next == Py_None) {
            Py_XDECREF(next);
            Py_DECREF(node);
            return PyErr_Occurred() ? -1 : 0;
        }
        Py_DECREF(node);
        node = next;
    }
    kind = kind == GCK_NODE_LEAF ? 1 : kind < GCK_NODE_LEAF ? -1
         : kind == GCK_NODE_OTHER ? shares_with_leaf(state, x, node) : 0;
    Py_DECREF(node);
    return kind;
}

int gck_saved_formats_read(PyObject *pairs, gck_saved_formats *formats)
{
    int status = 0;

    for (Py_ssize_t i = 0; status == 0 && i < PyTuple_Size(pairs); i++) {
        const char *family, *codec;
        status = PyArg_ParseTuple(PyTuple_GetItem(pairs, i), "sz", &family, &codec) ? 0 : -1;
        if (status == 0) {
            formats->of[gck_family_of(family)] = codec != NULL ? gck_codec_find(codec) : NULL;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}
