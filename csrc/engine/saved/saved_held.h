/* saved_held.h: what a node tells: its sizes, and what it holds of the tensors that hooks of ours have packed. */
#ifndef GRADCKPT_SAVED_HELD_H
#define GRADCKPT_SAVED_HELD_H

#include "engine/saved/saved_row.h"
#include "engine/saved/saved_tensor.h"

/* The product of a sequence of ints, taken over; -1 with an exception. */
int64_t gck_product_of(PyObject *sizes);

/* The number of values of the node's result with this index; -1 with an exception. */
int64_t gck_node_numel(const gck_py *py, PyObject *node, Py_ssize_t result);

/* 1 when *exponent is the node's; 0: it is complex; -1. */
int gck_node_exponent(const gck_py *py, PyObject *node, double *exponent);

/* *data: what the node holds as this argument, Py_None where it holds nothing; NULL: it does not tell.  0 or -1. */
int gck_node_held(const gck_state *state, PyObject *node, PyObject *attribute, PyObject **data);

/* New reference: what a pack hook of ours returned for row n of this node, which has this kind, also within what other
 * hooks made of it; NULL: nothing, or an exception.  The same of an attribute. */
gck_saved_tensor *gck_node_saved(const gck_state *state, PyObject *node, int kind, int n);
gck_saved_tensor *gck_node_saved_as(const gck_state *state, PyObject *node, PyObject *attribute);

/* New reference: a list of what hooks returned for what a Function's node has saved, empty where a backward has freed
 * it; and of one of these what a pack hook of ours returned, as above. */
PyObject *gck_function_saves(const gck_state *state, PyObject *node);
gck_saved_tensor *gck_function_saved(const gck_state *state, PyObject *all, Py_ssize_t place);

/* The place among what a Function's node has saved; -1: none; -2 with an exception. */
Py_ssize_t gck_function_place(const gck_state *state, PyObject *node, const gck_saved_tensor *packed);

#endif
