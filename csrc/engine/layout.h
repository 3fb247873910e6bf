/* layout.h: which strides a restored tensor has.
 *
 * Which kernel torch takes, and so the last bit of what it computes, may depend on them.  A codec without loss gives
 * back a tensor with the original's: holes and overlaps included, and memory for the span of it while a region runs
 * again, which is never more than the storage that the original was part of.  One that rounds keeps the order of the
 * dimensions, and leaves holes out; where elements overlap it makes a contiguous tensor. */
#ifndef GRADCKPT_LAYOUT_H
#define GRADCKPT_LAYOUT_H

#include "../gradckpt.h"

enum { GCK_LAYOUT_PLAIN, GCK_LAYOUT_DENSE, GCK_LAYOUT_HOLES };

/* Strides of x restored, ndim of them, into strides[].  PLAIN: those of a contiguous tensor; HOLES: there is memory
 * between the elements that is none of theirs. */
int gck_layout_of(const gck_tensor *x, int exact, int64_t *strides);

/* 1 when the values fill their memory without holes or overlaps. */
int gck_is_dense(const gck_tensor *x);

#endif
