/* region_node_backward.h: the backward of a region that is one node. */
#ifndef GRADCKPT_REGION_NODE_BACKWARD_H
#define GRADCKPT_REGION_NODE_BACKWARD_H

#include "torch/objects.h"
#include "engine/region/frame.h"

/* backward(ctx, *grads) of the autograd Functions of region_node.h. */
PyObject *gck_node_backward(PyObject *module, PyObject *const *all, Py_ssize_t nall);

/* New reference: the tensors in a region's result, as a tuple.  `noted`, if not NULL, remembers the
 * rest; nothing for a single tensor. */
PyObject *gck_node_tensors(const gck_py *py, PyObject *out, gck_frame *noted);

#endif
