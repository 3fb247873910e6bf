/* selective_function.h: SelectiveRecompute: a region as one autograd node. */
#ifndef GRADCKPT_SELECTIVE_FUNCTION_H
#define GRADCKPT_SELECTIVE_FUNCTION_H

#include "selective.h"

/* New reference: the autograd Function. */
PyObject *gck_selective_class(PyObject *module, const gck_py *py);

#endif
