/* selective_function.h: SelectiveRecompute: a region as one autograd node. */
#ifndef GRADCKPT_SELECTIVE_FUNCTION_H
#define GRADCKPT_SELECTIVE_FUNCTION_H

#include "frame.h"
#include "selective.h"

/* New reference: the autograd Function. */
PyObject *gck_selective_class(PyObject *module, const gck_py *py);

/* Its backward(ctx, *grads). */
PyObject *gck_selective_backward(PyObject *module, PyObject *const *all, Py_ssize_t nall);

/* New reference: the region's function of these leaves, its operators caught as the policy wants. */
PyObject *gck_run_caught(gck_frame *frame, PyObject *leaves, int replay);

#endif
