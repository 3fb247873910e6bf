/* region_node.h: a region as one node of the graph: the reentrant form of checkpoint(), and
 * SelectiveRecompute.
 *
 * Forward runs the region without a graph.  Backward runs it again on inputs without
 * history, with grad, and differentiates that by a backward of its own. */
#ifndef GRADCKPT_REGION_NODE_H
#define GRADCKPT_REGION_NODE_H

#include "engine/region/frame.h"
#include "engine/options.h"

/* checkpoint(..., use_reentrant=True).  kwargs: keywords that are not ours, or NULL. */
PyObject *gck_reentrant_call(gck_state *state, const gck_options *o, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwargs);

/* The two autograd Functions, in the state.  0 or -1. */
int gck_node_classes(PyObject *module, gck_state *state);

/* Their backward(ctx, *grads). */
PyObject *gck_node_backward(PyObject *module, PyObject *const *all, Py_ssize_t nall);

/* New reference: the tensors in a region's result, as a tuple.  `noted`, if not NULL, remembers the
 * rest; nothing for a single tensor. */
PyObject *gck_node_tensors(const gck_py *py, PyObject *out, gck_frame *noted);

#endif
