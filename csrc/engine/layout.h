/* layout.h: which strides a restored tensor has. */
#ifndef GRADCKPT_LAYOUT_H
#define GRADCKPT_LAYOUT_H

#include "../gradckpt.h"

/* 1 when the values fill their memory without holes or overlaps: such strides are kept. */
int gck_is_dense(const gck_tensor *x);

#endif
