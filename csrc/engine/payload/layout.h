/* layout.h: which strides a restored tensor has, and which of its values a payload holds.
 *
 * Strides decide which kernel torch takes, which operands it saves, and so more than the last bit
 * of the result.  An argument of a region therefore comes back with its own, holes and overlaps
 * included.  While a region runs again this takes memory for the whole reach, which is never more
 * than the storage that the original was part of.  What may live longer has no holes. */
#ifndef GRADCKPT_LAYOUT_H
#define GRADCKPT_LAYOUT_H

#include "gradckpt.h"

typedef enum {
    GCK_LAYOUT_PLAIN,      /* of a contiguous tensor, in each dimension           */
    GCK_LAYOUT_STRIDED,    /* each value has memory of its own                    */
    GCK_LAYOUT_EXPANDED,   /* the same without the dimensions whose stride is 0   */
    GCK_LAYOUT_RUN,        /* values overlap and leave no hole: the reach is encoded as it lies there */
    GCK_LAYOUT_TANGLED,    /* values overlap and leave holes: no payload can hold this layout */
} gck_layout;

/* Write the ndim strides of the restored x to strides[], for PLAIN nothing.  exact 0: without holes
 * and overlaps, PLAIN or STRIDED. */
gck_layout gck_layout_of(const gck_tensor *x, int exact, int64_t *strides);

/* 1 when the values fill their memory without holes or overlaps. */
int gck_is_dense(const gck_tensor *x);

/* Values from the first to the last one in memory, those between them included. */
int64_t gck_reach(int ndim, const int64_t *sizes, const int64_t *strides);

/* Values, each counted once that several elements share by a stride of 0. */
int64_t gck_distinct(const gck_tensor *x);

#endif
