/* region_node.h: a region as one node of the graph: the reentrant form of checkpoint(), and
 * SelectiveRecompute.
 *
 * Forward runs the region without a graph.  Backward runs it again on inputs without
 * history, with grad, and differentiates that by a backward of its own. */
#ifndef GRADCKPT_REGION_NODE_H
#define GRADCKPT_REGION_NODE_H

#include "engine/state.h"
#include "engine/checkpoint_options.h"

/* checkpoint(..., use_reentrant=True).  kwargs: keywords that are not ours, or NULL. */
PyObject *gck_reentrant_call(gck_state *state, const gck_options *o, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwargs);

/* The two autograd Functions, in the state.  0 or -1. */
int gck_node_classes(PyObject *module, gck_state *state);

#endif
