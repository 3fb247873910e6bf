/* exchanged.h: tensors without a node that changed places between the two runs of a region. */
#ifndef GRADCKPT_EXCHANGED_H
#define GRADCKPT_EXCHANGED_H

#include "engine/region/frame.h"

/* 1 when the recompute saved another leaf in slot i than the forward; 0; -1.  A pair of different leaves
 * says nothing: a parameter may be replaced, gathered, or cached, and of a constant autograd may save what
 * it does not use.  Where the region has both, it matters unless their values are equal. */
int gck_leaf_is_exchanged(const gck_frame *frame, const gck_origin *origins, Py_ssize_t n, Py_ssize_t i);

#endif
