/* sparse_payload.h: which values of a tensor in host memory are not zero, block by block, and the
 * payload of sparse. */
#ifndef GRADCKPT_SPARSE_PAYLOAD_H
#define GRADCKPT_SPARSE_PAYLOAD_H

#include "codec/format/sparse.h"

/* How many there are in blocks [first, last); before: one number for each block is written there, or
 * NULL.  unsigned_zeros: -0 is zero, too. */
int64_t gck_count_nonzeros(const gck_tensor *x, uint64_t *before, int unsigned_zeros, int64_t first, int64_t last);

/* From the number of each block to the number in earlier blocks.  GCK_OK, or GCK_E_OVERFLOW when they
 * are more than `room`. */
int gck_place_nonzeros(uint64_t *before, int64_t numel, int64_t room);

/* Bits that are set in those of a block's groups. */
int gck_count_bits(const uint8_t *bitmap, int64_t groups);

/* A block that does not lie within its payload: NaN for each of its values. */
void gck_decode_nans(const uint8_t *bitmap, int64_t groups, gck_dtype dtype, void *values);

/* `sparse` of blocks [first, last): what lossless.c stores, too, where it is smaller.  The payload has
 * x->room bytes. */
int64_t gck_sparse_count(const gck_tensor *x, void *payload, int64_t first, int64_t last);
int     gck_sparse_place(const gck_tensor *x, void *payload);
int     gck_sparse_encode(const gck_tensor *x, void *payload, int64_t first, int64_t last);
void    gck_sparse_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last);

#endif
