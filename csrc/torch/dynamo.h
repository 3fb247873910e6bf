/* dynamo.h: keeps torch.compile out of regions that run without it. */
#ifndef GRADCKPT_DYNAMO_H
#define GRADCKPT_DYNAMO_H

#include "torch/objects.h"

/* Where a graph breaks at a region, its function is called from code that is being compiled, and
 * run again by a backward that may not be.  Dynamo's version would save other tensors than the
 * recompute.  So no frame below is compiled in either run, as in torch; torch.compile objects
 * inside still are.  *before: NULL, or owned, for gck_dynamo_restore.  0 or -1. */
int gck_dynamo_off(const gck_py *py, PyObject **before);

/* Restore the hook, also with an exception pending, which survives. */
void gck_dynamo_restore(const gck_py *py, PyObject *before);

#endif
