/* input_aliasing.h: arguments of a compressed region that share memory.
 *
 * Each argument is restored separately.  So a write that reached two of them in the forward
 * reaches one in the recompute, and the gradients would be wrong without any error.  Torch
 * rejects every write to an argument; this code rejects one that another argument sees. */
#ifndef GRADCKPT_INPUT_ALIASING_H
#define GRADCKPT_INPUT_ALIASING_H

#include "torch/input.h"
#include "torch/objects.h"

/* `rows`: a list of (the tensor, what the function gets for it, its payload, version of the second); payload None: by
 * reference; NULL: no rows. */

/* Add the argument in->x to *rows.  `fed` is what the function gets for it, and `payload` what it is kept
 * as; NULL: by reference.  0 or -1. */
int gck_input_aliasing_add(PyObject **rows, gck_py *py, gck_input *in, PyObject *fed, PyObject *payload);

/* New reference: the payload that x, with these values, already got as an argument, and *fed; or
 * NULL. */
PyObject *gck_input_aliasing_find(PyObject *rows, const gck_input *in, PyObject **fed);

/* After the function has run, copy what it wrote to an argument's replacement to the argument.  0,
 * or -1 with an exception, also when the function wrote to memory that a compressed argument shares
 * with another. */
int gck_input_aliasing_check(PyObject *rows, const gck_py *py);

#endif
