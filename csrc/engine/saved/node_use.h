/* node_use.h: what uses the result of a node, as far as the error of what the node has saved depends on it.
 *
 * A product multiplies the gradient that reaches it by what it has saved, value by value.  Where something
 * with a pole uses the product, that gradient is largest just where the saved values are smallest, so even
 * a small error of these is larger than the right result. */
#ifndef GRADCKPT_NODE_USE_H
#define GRADCKPT_NODE_USE_H

#include "engine/saved/saved_node.h"

/* The use of a node's result: what amplifies no error; something that may, or that nothing is known of; a pole; or
 * not known yet, of so many nodes on one path. */
typedef enum { GCK_USED, GCK_DOUBTED, GCK_AMPLIFIED, GCK_OPEN, GCK_OPEN_LAST = GCK_OPEN + 15 } gck_use;

/* The use of what is behind the edge with this index, a tuple, of a node whose own result is used so.  -1 with an
 * exception.  kind: of the node. */
int gck_use_behind(gck_state *state, PyObject *node, int kind, PyObject *edge, Py_ssize_t index, gck_use above);

/* 1 when a node of this kind may amplify an error of what it uses; 0. */
int gck_node_may_amplify(int kind);

/* 1 when the node multiplies what it saves value by value, so that this use of its result, not GCK_USED, matters;
 * 0; -1.  kind: of the node. */
int gck_use_matters(gck_state *state, PyObject *node, int kind);

/* 1 when the node is a product one factor of which was made by something steep: so is the error of the other one
 * amplified; 0; -1.  kind: of the node. */
int gck_made_steeply(gck_state *state, PyObject *node, int kind);

#endif
