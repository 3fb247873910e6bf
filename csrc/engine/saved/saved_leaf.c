/* saved_leaf.c: whether a saved tensor lies in the memory of a weight. */
#include "engine/saved/saved_leaf.h"

#include "torch/calls.h"
#include "torch/input.h"
#include "engine/saved/saved_node.h"

enum { MAX_STEPS = 16 };           /* the most nodes between a weight and the saved view of it */

/* New reference: the node behind a node's first edge, Py_None where nothing is behind it. */
static PyObject *behind(const gck_py *py, PyObject *node)
{
    GCK_SCOPED PyObject *edges = PyObject_GetAttr(node, py->names.next_functions);
    return edges == NULL ? NULL : Py_NewRef(PyTuple_Size(edges) > 0
                                            ? PyTuple_GetItem(PyTuple_GetItem(edges, 0), 0) : Py_None);
}

/* 1 when x shares its storage with a leaf that goes into this node, a user's Function; 0, -1. */
static int shares_with_leaf(gck_state *state, PyObject *x, PyObject *node)
{
    GCK_SCOPED PyObject *edges = PyObject_GetAttr(node, state->py.names.next_functions);
    const void *own = NULL, *of_leaf;
    int shares = edges == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; shares == 0 && i < PyTuple_Size(edges); i++) {
        PyObject *next = PyTuple_GetItem(PyTuple_GetItem(edges, i), 0);
        const int kind = next != Py_None ? gck_node_kind(state, next) : GCK_NODE_OTHER;
        if (kind != GCK_NODE_LEAF) {
            shares = kind < GCK_NODE_LEAF ? -1 : 0;
            continue;
        }
        GCK_SCOPED PyObject *leaf = PyObject_GetAttrString(next, "variable");
        of_leaf = NULL;
        shares = leaf == NULL || (own == NULL && gck_storage_of(&state->py, x, &own) < 0)
              || gck_storage_of(&state->py, leaf, &of_leaf) < 0 ? -1 : of_leaf != NULL && of_leaf == own;
    }
    return shares;
}

int gck_lies_in_leaf(gck_state *state, PyObject *x, PyObject *node)
{
    GCK_SCOPED PyObject *at = Py_NewRef(node);
    int kind = GCK_NODE_VIEW;

    for (int step = 0; step <= MAX_STEPS && (kind = gck_node_kind(state, at)) == GCK_NODE_VIEW; step++) {
        GCK_SCOPED PyObject *before = at;
        at = step < MAX_STEPS ? behind(&state->py, before) : NULL;
        if (at == NULL || at == Py_None) {
            return PyErr_Occurred() ? -1 : 0;
        }
    }
    return kind == GCK_NODE_LEAF ? 1 : kind < GCK_NODE_LEAF ? -1
         : kind == GCK_NODE_OTHER ? shares_with_leaf(state, x, at) : 0;
}

int gck_goes_into(gck_state *state, PyObject *x, PyObject *node)
{
    GCK_SCOPED PyObject *base = PyObject_GetAttr(x, state->py.names._base);
    const int parameter = base == NULL ? -1 : (PyObject *)Py_TYPE(base) == state->py.Parameter;

    return parameter != 0 ? parameter : shares_with_leaf(state, x, node);
}
