/* layout.h: which strides a restored tensor has.
 *
 * They may decide which kernel torch takes, and so the last bit of the result.  A lossless codec
 * restores the original's strides, holes and overlaps included.  While a region runs again this
 * takes memory for the whole span, which is never more than the storage that the original was part
 * of.  A rounding codec keeps the order of the dimensions and drops the holes; where elements
 * overlap it makes a contiguous tensor. */
#ifndef GRADCKPT_LAYOUT_H
#define GRADCKPT_LAYOUT_H

#include "gradckpt.h"

enum { GCK_LAYOUT_PLAIN, GCK_LAYOUT_DENSE, GCK_LAYOUT_HOLES };

/* Write the ndim strides of the restored x to strides[].  PLAIN: those of a contiguous tensor.
 * HOLES: memory lies between the elements that belongs to none of them. */
int gck_layout_of(const gck_tensor *x, int exact, int64_t *strides);

/* 1 when the values fill their memory without holes or overlaps. */
int gck_is_dense(const gck_tensor *x);

#endif
