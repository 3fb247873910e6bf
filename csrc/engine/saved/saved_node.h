/* saved_node.h: what gradckpt knows about the nodes of autograd's graph, by their types. */
#ifndef GRADCKPT_SAVED_NODE_H
#define GRADCKPT_SAVED_NODE_H

#include "torch/input.h"
#include "engine/state.h"
#include "engine/saved/saved_functions.h"
#include "engine/saved/saved_row.h"

/* The kind of this node; below GCK_NODE_LEAF with an exception. */
int gck_node_kind(gck_state *state, PyObject *node);

/* Row n of the nodes of this kind; NULL behind the last, and where they have none. */
const gck_saved_row *gck_saved_row_of(int kind, int n);

/* Its attribute _raw_saved_<argument>: borrowed; NULL for one of a Function, of which the argument is a number. */
PyObject *gck_saved_attribute(const gck_state *state, int kind, int n);

/* What is known of the Function whose nodes have this kind; NULL: it has no rows, or is none. */
const gck_function *gck_node_function(int kind);

/* 1 when the tensor is a result of the operator. */
int gck_saved_row_is_result(const gck_saved_row *row);

/* New reference: the node that made the tensor, or None; NULL with an exception.  Reads whether it requires
 * grad.  What other hooks passed in place of a tensor, without its history, is replaced in *in by the
 * tensor itself, where that is known. */
PyObject *gck_node_of(gck_state *state, gck_input *in);

/* The family of this name, or -1; the name of a family. */
int gck_family_of(const char *name);
const char *gck_family_name(gck_family family);

/* For Python: saved_roles(): a list of (node, argument, family or None, how it is kept). */
PyObject *gck_saved_roles(PyObject *module, PyObject *unused);

/* For Python: saved_nodes(): by a node's name what is known of it: its rows, (argument, role, family or None), or the
 * name of its kind. */
PyObject *gck_saved_nodes(PyObject *module, PyObject *unused);

#endif
