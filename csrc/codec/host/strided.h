/* strided.h: a run of values in contiguous order, from or into any strides. */
#ifndef GRADCKPT_STRIDED_H
#define GRADCKPT_STRIDED_H

#include "gradckpt.h"

/* Values [first, first + count) of x's contiguous order, packed into dst. */
void gck_gather(const gck_tensor *x, int64_t first, int64_t count, void *dst);

/* The reverse: write packed values of src to x's memory. */
void gck_scatter(const gck_tensor *x, int64_t first, int64_t count, const void *src);

#endif
