/* leaves.h: what goes into a region and comes out of it, as flat lists.
 *
 * A leaf is what torch's pytree calls so: anything that is no container. */
#ifndef GRADCKPT_LEAVES_H
#define GRADCKPT_LEAVES_H

#include "frame.h"

/* New reference: the leaves as a list; *spec: how they make up (args, kwargs), or NULL when
 * they are the arguments themselves. */
PyObject *gck_leaves_flatten(gck_py *py, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs, PyObject **spec);

/* New reference: frame->function of these leaves. */
PyObject *gck_leaves_call(gck_frame *frame, PyObject *leaves);

/* New reference: the tensors among the leaves of what came out, as a tuple.  `rest`, if asked
 * for: (the leaves with None in their places, spec), or NULL for a single tensor. */
PyObject *gck_leaves_tensors(gck_py *py, PyObject *out, PyObject **rest);

/* Remember in the frame which leaves of the output were tensors.  0 or -1. */
int gck_leaves_note(gck_frame *frame, PyObject *out);

/* New reference: the output, from tensors that autograd has made its own. */
PyObject *gck_leaves_assemble(gck_frame *frame, PyObject *tensors);

#endif
