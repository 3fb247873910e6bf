/* node_use.c: follows uses through a node. */
#include "engine/saved/node_use.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "engine/saved/saved_held.h"
#include "engine/saved/saved_tensor.h"

#include <string.h>

/* Of fewer values than this their sum may be small because one of them is. */
enum { MANY = 32 };

/* ---- sums ---- */

/* 1 when each value of the node's result comes from many of those behind the edge; 0; -1. */
static int comes_from_many(gck_state *state, PyObject *node, PyObject *edge)
{
    const long which = PyLong_AsLong(PyTuple_GetItem(edge, 1));
    const int64_t own = which == -1 && PyErr_Occurred() ? -1 : gck_node_numel(&state->py, node, 0);
    const int64_t from = own < 0 ? -1 : gck_node_numel(&state->py, PyTuple_GetItem(edge, 0), which);

    return from < 0 ? -1 : from >= MANY * own;
}

/* The size that the argument of row n shares with the other factor, in *size; INT64_MAX: not known.  0 or -1. */
static int shared_size(gck_state *state, PyObject *node, int kind, int n, int64_t *size)
{
    const gck_saved_row *row = gck_saved_row_of(kind, n);
    const size_t length = strlen(row->argument);
    GCK_SCOPED gck_saved_tensor *saved = gck_node_saved(state, node, kind, n);

    *size = INT64_MAX;
    if (saved == NULL || saved->form.entry.kind == GCK_PACKED_OBJECT) {
        return PyErr_Occurred() ? -1 : 0;
    }
    GCK_SCOPED PyObject *shape = PyObject_GetAttr(saved->form.entry.value, state->py.names.shape);
    const Py_ssize_t ndim = shape != NULL ? PySequence_Size(shape) : -1;
    if (ndim >= 2 && row->family == GCK_CONVOLUTION) {           /* of a weight: what one result comes from */
        *size = strcmp(row->argument, "weight") == 0 ? 1 : INT64_MAX;
        for (Py_ssize_t d = 1; *size > 0 && *size < INT64_MAX && d < ndim; d++) {     /* -1: it refuses */
            *size *= gck_as_int64(PySequence_GetItem(shape, d));
        }
    } else if (ndim >= 2) {
        const int second = row->argument[0] > '9' && row->argument[length - 1] == '2';     /* mat2, of a product */
        *size = gck_as_int64(PySequence_GetItem(shape, second ? ndim - 2 : ndim - 1));
    }
    return PyErr_Occurred() ? gck_clear_refusal() : 0;
}

/* 1 when each value of this product of matrices, or convolution, comes from a few values; 0; -1. */
static int is_narrow(gck_state *state, PyObject *node, int kind)
{
    int64_t size;
    int narrow = 0;

    for (int n = 0; state->nodes_tell && narrow == 0 && gck_saved_row_of(kind, n) != NULL; n++) {
        narrow = shared_size(state, node, kind, n, &size) < 0 ? -1 : size < MANY;
    }
    return narrow;
}

/* ---- through a node ---- */

/* 1 when a product of matrices, a convolution or a norm only adds what is behind this edge. */
static int is_added(const gck_saved_row *row, Py_ssize_t index)
{
    return strncmp(row->node, "Add", 3) == 0 || strncmp(row->node, "Badd", 4) == 0 ? index == 0 : index == 2;
}

/* The same of a node that has rows. */
static int behind_row(gck_state *state, PyObject *node, int kind, PyObject *edge, Py_ssize_t index, gck_use above)
{
    const gck_saved_row *row = gck_saved_row_of(kind, 0);
    double exponent;
    int real;

    switch (row->family) {
    case GCK_PRODUCT:
        real = row->role != GCK_ROLE_POWER ? 1 : gck_node_exponent(&state->py, node, &exponent);
        return real <= 0 ? (real < 0 ? -1 : GCK_DOUBTED)
             : row->role == GCK_ROLE_POWER && exponent < 1 ? GCK_AMPLIFIED : (int)above;
    case GCK_LINEAR:
    case GCK_MATMUL:
    case GCK_CONVOLUTION:
        real = above == GCK_USED ? 0 : is_added(row, index) ? 1 : is_narrow(state, node, kind);
        return real < 0 ? -1 : real ? (int)above : GCK_USED;
    case GCK_NORM:
        return is_added(row, index) ? above : GCK_USED;
    case GCK_POOLING:
        real = above == GCK_USED ? 1 : comes_from_many(state, node, edge);
        return real < 0 ? -1 : real ? GCK_USED : (int)above;
    case GCK_ACTIVATION:
    case GCK_SIGN:
        return above;
    default:
        return GCK_USED;
    }
}

int gck_node_may_amplify(int kind)
{
    return kind == GCK_NODE_OTHER || kind == GCK_NODE_PEAK || kind == GCK_NODE_NORM
        || (kind <= GCK_NODE_POLE && kind >= GCK_NODE_POLE_2)
        || (kind >= 0 && gck_saved_row_of(kind, 0)->role == GCK_ROLE_POWER);
}

int gck_use_behind(gck_state *state, PyObject *node, int kind, PyObject *edge, Py_ssize_t index, gck_use above)
{
    int many;

    switch (kind) {
    case GCK_NODE_OTHER:
        return GCK_DOUBTED;
    case GCK_NODE_VIEW:
    case GCK_NODE_PLAIN:
        return above;
    case GCK_NODE_PEAK:
        return above == GCK_AMPLIFIED ? GCK_AMPLIFIED : GCK_DOUBTED;
    case GCK_NODE_SUM:
    case GCK_NODE_NORM:
        many = kind == GCK_NODE_SUM && above == GCK_USED ? 1 : comes_from_many(state, node, edge);
        return many < 0 ? -1 : many ? GCK_USED : kind == GCK_NODE_NORM ? GCK_AMPLIFIED : (int)above;
    case GCK_NODE_POLE:
        return GCK_AMPLIFIED;
    case GCK_NODE_POLE_0:
    case GCK_NODE_POLE_1:
    case GCK_NODE_POLE_2:
        return index == GCK_NODE_POLE_0 - kind ? GCK_AMPLIFIED : (int)above;
    default:
        return kind >= 0 ? behind_row(state, node, kind, edge, index, above) : GCK_USED;
    }
}

/* 1 when the node has a weight that needs a gradient: behind its second edge; 0; -1. */
static int has_weight(gck_state *state, PyObject *node)
{
    GCK_SCOPED PyObject *edges = PyObject_GetAttr(node, state->py.names.next_functions);
    return edges == NULL ? -1
         : PyTuple_Size(edges) > 1 && PyTuple_GetItem(PyTuple_GetItem(edges, 1), 0) != Py_None;
}

int gck_use_matters(gck_state *state, PyObject *node, int kind)
{
    const gck_saved_row *row = gck_saved_row_of(kind, 0);

    switch (row != NULL ? (int)row->family : -1) {
    case GCK_PRODUCT:
        return 1;
    case GCK_NORM:
        return has_weight(state, node);
    case GCK_LINEAR:
    case GCK_MATMUL:
    case GCK_CONVOLUTION:
        return is_narrow(state, node, kind);
    default:
        return 0;
    }
}

/* ---- what made a product ---- */

/* A walk behind a product of so many values: how many nodes it may still visit. */
typedef struct { int64_t numel; int left; } walk;

/* 1 when the derivative of this node by what is behind the edge with this index has no bound; 0; -1. */
static int is_steep_by(gck_state *state, PyObject *node, int kind, Py_ssize_t index)
{
    double exponent;
    int real;

    if (kind >= 0 && gck_saved_row_of(kind, 0)->role == GCK_ROLE_POWER) {
        real = gck_node_exponent(&state->py, node, &exponent);
        return real <= 0 ? real : exponent < 1;
    }
    return kind == GCK_NODE_POLE || (kind <= GCK_NODE_POLE_0 && kind >= GCK_NODE_POLE_2
                                     && index == GCK_NODE_POLE_0 - kind);
}

/* 1 when something steep made this node's result, value by value; 0; -1. */
static int is_steep(gck_state *state, PyObject *node, int kind, walk *w)
{
    GCK_SCOPED PyObject *edges = PyObject_GetAttr(node, state->py.names.next_functions);
    const gck_family family = kind >= 0 ? gck_saved_row_of(kind, 0)->family : GCK_NFAMILIES;
    const int passes = kind == GCK_NODE_VIEW || kind == GCK_NODE_PLAIN || kind == GCK_NODE_PEAK
                    || family == GCK_PRODUCT || family == GCK_ACTIVATION || (kind >= 0 && family == GCK_SIGN)
                    || (kind <= GCK_NODE_POLE && kind >= GCK_NODE_POLE_2);
    int steep = edges == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; steep == 0 && passes && w->left > 0 && i < PyTuple_Size(edges); i++) {
        PyObject *edge = PyTuple_GetItem(edges, i), *next = PyTuple_GetItem(edge, 0);
        const int next_kind = next != Py_None ? gck_node_kind(state, next) : GCK_NODE_LEAF;
        int64_t from;
        steep = next_kind < GCK_NODE_LEAF ? -1 : next_kind == GCK_NODE_LEAF ? 0 : is_steep_by(state, node, kind, i);
        if (steep > 0) {                         /* the gradient of few values sums those of many */
            from = gck_node_numel(&state->py, next, PyLong_AsLong(PyTuple_GetItem(edge, 1)));
            steep = from < 0 ? -1 : from > w->numel / MANY;
        }
        if (steep == 0 && next_kind > GCK_NODE_LEAF) {
            w->left--;
            steep = is_steep(state, next, next_kind, w);
        }
    }
    return steep;
}

int gck_made_steeply(gck_state *state, PyObject *node, int kind)
{
    walk w = {.numel = 0, .left = 32};

    if (kind < 0 || gck_saved_row_of(kind, 0)->role != GCK_ROLE_FACTOR) {
        return 0;
    }
    w.numel = gck_node_numel(&state->py, node, 0);
    return w.numel < 0 ? -1 : is_steep(state, node, kind, &w);
}
