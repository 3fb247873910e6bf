/* saved_role.c: finds the form that suffices for the node which saves a tensor. */
#include "engine/saved/saved_role.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "engine/saved/saved_functions.h"
#include "engine/saved/saved_held.h"
#include "engine/saved/saved_leaf.h"
#include "engine/saved/saved_tensor.h"


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
    return gck_as_int64(PyObject_GetAttrString(node, name));
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
    GCK_SCOPED PyObject *value = alpha < 0 ? NULL
                               : PyObject_GetAttrString(node, alpha ? "_saved_alpha" : "_saved_beta");
    const double scale = value != NULL ? PyFloat_AsDouble(value) : -1;

    return PyErr_Occurred() ? gck_clear_refusal() : scale == 1;
}

/* 1 when no row can spoil another: none shares a group with another, or all are of like size. */
static int has_like_rows(gck_state *state, PyObject *node, const gck_input *in, const gck_tensor *view)
{
    const int device = view->device;
    const int shape = gck_is_function(node) ? 0 : gck_has_attribute(node, "_saved_normalized_shape");
    int64_t values, groups;

    if (shape < 0) {
        return -1;
    }
    if (gck_is_function(node)) {                 /* it tells no sizes, but normalizes along the last dimension */
        return view->ndim > 0 && view->sizes[view->ndim - 1] % GCK_GROUP == 0;
    }
    if (shape) {
        values = gck_product_of(PyObject_GetAttrString(node, "_saved_normalized_shape"));
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
    GCK_SCOPED PyObject *plain = args != NULL ? PyObject_CallMethodObjArgs(in->x, state->py.names.detach, NULL) : NULL;

    if (plain == NULL) {
        Py_XDECREF(args);
        return -1;
    }
    as->part = gck_method(plain, method, args);
    as->codec = codec != NULL ? gck_codec_find(codec) : as->codec;
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
    GCK_SCOPED PyObject *value = PyObject_GetAttrString(node, "_saved_dim");
    const long long dim = value != NULL ? (long long)PyLong_AsUnsignedLongLongMask(value) : -1;

    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(dim);
}

/* 1 when the attention's result is not kept, but made again; 0, -1. */
static int is_made_again(const gck_state *state, PyObject *node)
{
    GCK_SCOPED gck_saved_tensor *saved = !state->nodes_tell ? NULL
                                       : gck_node_saved_as(state, node, state->py.names._raw_saved_output);

    return saved != NULL ? saved->form.entry.kind == GCK_PACKED_OBJECT : PyErr_Occurred() ? -1 : 0;
}

/* Find out how the node's results are made again, and make its log-sum-exp one that is.  0, for then they
 * have no codec; or -1. */
static int make_again(const gck_state *state, PyObject *node, gck_saved_as *as)
{
    GCK_SCOPED PyObject *made = !state->nodes_tell ? Py_NewRef(Py_None)
                              : PyObject_CallFunctionObjArgs(state->py.call.attention_again, node, NULL);
    PyObject *result, *sums, *make_sums;

    if (made == NULL || made == Py_None) {
        return made == NULL ? -1 : 0;
    }
    if (!PyArg_ParseTuple(made, "OO!O", &result, state->SavedTensor, &sums, &make_sums)) {
        return -1;
    }
    as->again = Py_NewRef(result);
    gck_saved_form_make_again(&((gck_saved_tensor *)sums)->form, make_sums);
    return 0;
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
    if (row->family < GCK_NFAMILIES) {
        const int rule = gck_saved_rule(formats, node, row->argument, &as->codec);
        as->codec = rule == 0 ? formats->of[row->family] : as->codec;
        if (rule < 0 || as->codec == NULL) {
            return rule < 0 ? -1 : 0;
        }
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
        holds = has_like_rows(state, node, in, &view);
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

int gck_saved_as_input(gck_state *state, const gck_saved_formats *formats, PyObject *node, gck_saved_tensor *packed,
                       gck_input *in, gck_saved_as *as)
{
    const int kind = gck_node_kind(state, node);
    const gck_saved_row *row;
    const gck_function *function = gck_node_function(kind);
    int weight;

    if (packed->result && function != NULL && !function->of_results) {
        return 0;
    }
    weight = packed->reason != 0 && kind >= GCK_NODE_LEAF ? gck_goes_into(state, in->x, node) : 0;
    if (weight != 0) {
        return weight < 0 ? -1 : 0;
    }
    for (int n = 0; (row = gck_saved_row_of(kind, n)) != NULL; n++) {
        const int result = gck_saved_row_is_result(row);
        int found = !result && !state->nodes_tell;      /* then the node's name alone decides */
        if (!result && !found) {
            GCK_SCOPED gck_saved_tensor *saved = gck_node_saved(state, node, kind, n);
            found = saved != NULL ? saved == packed : PyErr_Occurred() ? -1 : 0;
        }
        if (found > 0 && row->family == GCK_NORM && function != NULL && !function->of_results
            && packed->reason == GCK_SKIP_NO_GRAD) {
            return 0;                            /* new in the forward: it may be the result in another dtype */
        }
        if (found != 0) {
            return found < 0 ? -1 : form_of(state, formats, row, node, in, as);
        }
    }
    if (kind == GCK_NODE_OTHER && gck_is_function(node)) {
        return gck_saved_rule_of_function(state, formats, node, packed, in, as);
    }
    return kind < GCK_NODE_LEAF ? -1 : 0;
}

/* 1 when the node has no such result yet: it is about to be saved; 0, -1. */
static int is_open(const gck_state *state, PyObject *node, PyObject *attribute)
{
    GCK_SCOPED PyObject *data = NULL, *name = NULL, *value = NULL;

    if (!state->nodes_tell) {
        return 1;
    }
    if (gck_node_held(state, node, attribute, &data) < 0 || data != Py_None) {
        return PyErr_Occurred() ? -1 : 0;
    }
    name = PyUnicode_Substring(attribute, 4, PyUnicode_GetLength(attribute));
    value = name != NULL ? PyObject_GetAttr(node, name) : NULL;
    return value == NULL ? gck_clear_refusal() : value == Py_None;
}

int gck_saved_as_result(gck_state *state, const gck_saved_formats *formats, PyObject *node, gck_input *in,
                        gck_saved_as *as)
{
    const int kind = gck_node_kind(state, node);
    const gck_saved_row *row;

    for (int n = 0; (row = gck_saved_row_of(kind, n)) != NULL; n++) {
        const int open = gck_saved_row_is_result(row) ? is_open(state, node, gck_saved_attribute(state, kind, n)) : 0;
        if (open != 0) {
            return open < 0 ? -1 : form_of(state, formats, row, node, in, as);
        }
    }
    return kind < GCK_NODE_LEAF ? -1 : 0;
}
