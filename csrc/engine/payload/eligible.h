/* eligible.h: the one rule for which tensors compress= compresses, before their memory is looked
 * at. */
#ifndef GRADCKPT_ELIGIBLE_H
#define GRADCKPT_ELIGIBLE_H

#include "engine/state.h"

/* GCK_COMPRESS, GCK_SKIP_NO_GRAD or GCK_SKIP_LEAF.  What does not require grad is skipped first,
 * whatever `leaf` says. */
gck_skip_reason gck_eligible(const gck_plan *plan, int requires_grad, int leaf, int parameter);

/* For Python: eligible(requires_grad, is_leaf, floating, fake_quantize), of what is no
 * parameter. */
PyObject *gck_eligible_py(PyObject *module, PyObject *args);

#endif
