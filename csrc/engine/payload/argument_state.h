/* argument_state.h: what an argument has beside its values: attributes of a tensor, and what pytree
 * drops of a container.  What is restored gets it back; argument_state.py says what may be copied. */
#ifndef GRADCKPT_ARGUMENT_STATE_H
#define GRADCKPT_ARGUMENT_STATE_H

#include "torch/objects.h"

/* New reference in *found to the attributes of a plain tensor, NULL: it has none.  0; 1 when they
 * cannot be copied; -1. */
int gck_attributes_read(const gck_py *py, PyObject *x, PyObject **found);

/* Give them to x, a plain tensor; NULL: none.  0 or -1. */
int gck_attributes_give(PyObject *x, PyObject *attributes);

/* Give the attributes of a tensor to its copy of any kind, if both are plain.  0 or -1. */
int gck_attributes_carry(const gck_py *py, PyObject *from, PyObject *to);

/* 1 when x, or a container in it, may have attributes: all but exact tuples, lists and dicts. */
int gck_container_may_have_state(const gck_py *py, PyObject *x);

/* New reference in *found to the state of x, NULL: it has none.  only_plain: 1 when it cannot be
 * copied; else 0, or -1. */
int gck_container_state_read(const gck_py *py, PyObject *x, int only_plain, PyObject **found);

/* Give it to a container that pytree made; NULL: none.  0 or -1. */
int gck_container_state_give(const gck_py *py, PyObject *x, PyObject *state);

#endif
