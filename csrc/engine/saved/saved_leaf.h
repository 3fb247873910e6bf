/* saved_leaf.h: whether a saved tensor lies in the memory of a weight. */
#ifndef GRADCKPT_SAVED_LEAF_H
#define GRADCKPT_SAVED_LEAF_H

#include "engine/state.h"

/* Whether x, whose history is `node`, lies in the memory of a leaf, seen through views and casts: 1, 0, -1. */
int gck_lies_in_leaf(gck_state *state, PyObject *x, PyObject *node);

/* Whether x, without history, lies in the memory of a parameter or of a leaf that goes into this node of a Function: 1,
 * 0, -1. */
int gck_goes_into(gck_state *state, PyObject *x, PyObject *node);

#endif
