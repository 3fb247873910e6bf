/* pieces.h: any tensor in host memory as contiguous runs of values, which kernels take. */
#ifndef GRADCKPT_PIECES_H
#define GRADCKPT_PIECES_H

#include "codec/format/lossless.h"

/* Process units [first, last) of a tensor, of `unit` values each (GCK_GROUP or GCK_BLOCK), in
 * contiguous runs: whole units in place, anything else through a buffer of GCK_BLOCK values whose
 * last group is padded with zeros.  in_place 0: everything through the buffer, which piece() may then change.
 * piece() gets the first value's index, the number of values, and
 * whether to stream.  Returns the status of the pieces: GCK_OK or GCK_E_OVERFLOW.  decode: piece()
 * writes the values. */
typedef int gck_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx);
int gck_encode_pieces(const gck_tensor *x, int64_t unit, int64_t first, int64_t last, int in_place, gck_piece *piece,
                      void *ctx);
void gck_decode_pieces(const gck_tensor *out, int64_t unit, int64_t first, int64_t last, int in_place,
                       gck_piece *piece, void *ctx);

/* The same block by block, of so many groups: the last one of a tensor, padded with zeros, may have fewer. */
typedef int gck_block(void *values, int64_t block, int64_t groups, void *ctx);
int gck_encode_blocks(const gck_tensor *x, int64_t first, int64_t last, gck_block *block, void *ctx);
void gck_decode_blocks(const gck_tensor *out, int64_t first, int64_t last, gck_block *block, void *ctx);

#endif
