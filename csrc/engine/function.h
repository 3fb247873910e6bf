/* function.h: the reentrant form: one autograd node for the whole region. */
#ifndef GRADCKPT_FUNCTION_H
#define GRADCKPT_FUNCTION_H

#include "options.h"

/* checkpoint(..., use_reentrant=True).  kwargs: what is no keyword of ours, or NULL. */
PyObject *gck_reentrant_call(gck_state *state, const gck_options *o, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwargs);

/* New reference: the autograd Function `CheckpointFunction`. */
PyObject *gck_function_class(PyObject *module, const gck_py *py);

#endif
