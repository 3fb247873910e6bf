/* leaves.h: what goes into a region and comes out of it, as flat lists.
 *
 * A leaf is what torch's pytree calls so: anything that is no container. */
#ifndef GRADCKPT_LEAVES_H
#define GRADCKPT_LEAVES_H

#include "frame.h"

/* New reference: the leaves as a list; *spec: how they make up (args, kwargs), or NULL when
 * they are the arguments themselves. */
PyObject *gck_leaves_flatten(gck_py *py, PyObject *args, PyObject *kwargs, PyObject **spec);

/* New reference: frame->function of these leaves. */
PyObject *gck_leaves_call(gck_frame *frame, PyObject *leaves);

/* New reference: the tensors among the leaves of what came out, as a tuple.  `noted`, if not
 * NULL, remembers the other leaves and where the tensors were; nothing for a single tensor. */
PyObject *gck_leaves_tensors(gck_py *py, PyObject *out, gck_frame *noted);

/* New reference: the output, from tensors that autograd has made its own. */
PyObject *gck_leaves_assemble(gck_frame *frame, PyObject *tensors);

#endif
