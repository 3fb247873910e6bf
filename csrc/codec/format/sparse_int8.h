/* sparse_int8.h: the payload of `sparse_int8`: which values are not zero, and those as int8.  This header
 * is the format; the host and sparse_int8.cu share it.
 *
 * Payload of n values, G groups and B blocks as in sparse.h, K values that are not zero (-0 is zero):
 *
 *     uint8_t  bitmap[G][16];                     offset 0
 *     uint64_t before[B];                         offset 16 G: how many of the K are in earlier blocks
 *     uint8_t  packed[K + 2 (ceil(K / 128) + B)]; offset 16 G + 8 B
 *
 * The values of block b begin at packed[p + 2 (p / 128 + b)], p = before[b], in groups of 128, the last one
 * of a block perhaps shorter: a scale of 16 bits, then a code for each value.  So a block depends on no
 * other, and what lies between two of them, at most two bytes, is zero.
 *
 * Scale and codes are those of int8_plain (group.h), except that
 *     a code that would be 0 is 1, or -1 of a negative value: what is not zero stays so;
 *     there is no form B: values between 1e30 and MAX become MAX of their sign.
 * A value that its dtype would round to zero decodes to the smallest of its sign. */
#ifndef GRADCKPT_SPARSE_INT8_H
#define GRADCKPT_SPARSE_INT8_H

#include "codec/format/escapes.h"
#include "codec/format/sparse.h"

/* Bytes from the first of `packed` on to the values of a block, with `before` others before it. */
GCK_LAYOUT_FN int64_t gck_packed_place(int64_t before, int64_t block)
{
    return before + 2 * (before / GCK_GROUP + block);
}

GCK_LAYOUT_FN int64_t gck_packed_nbytes(int64_t values, int64_t blocks)
{
    return values + 2 * (gck_groups_of(values) + blocks);
}

/* Where the packed values of a block end, and the next one's, or the payload. */
GCK_LAYOUT_FN int64_t gck_packed_end(int64_t before, int64_t count, int64_t block, int64_t blocks)
{
    return block + 1 < blocks ? gck_packed_place(before + count, block + 1)
                              : gck_packed_nbytes(before + count, blocks);
}

/* The parts of a payload of nbytes; `values` are the packed ones. */
static inline gck_sparse_parts gck_sparse_int8_parts_of(const void *payload, int64_t numel, int64_t nbytes)
{
    const int64_t head = gck_sparse_head(numel), left = nbytes - head - 2 * gck_blocks_of(numel);
    const int64_t group = GCK_GROUP + 2, rest = left % group;
    gck_sparse_parts parts = gck_sparse_parts_of(payload, numel, GCK_F32, nbytes);

    parts.room = left < 0 ? -1 : left / group * GCK_GROUP + (rest > 2 ? rest - 2 : 0);
    return parts;
}

/* Form A's scale of a group: `stored` of int8_plain, and how its values are multiplied before. */
typedef struct {
    uint32_t side;
    int      escaped;
    float    scale, factor;
} gck_packed_scale;

GCK_FN gck_packed_scale gck_packed_scale_of(float amax, int escaped)
{
    const int k = gck_prescale(GCK_INT8_PLAIN, amax);
    const float scale = gck_pow2(k);
    const uint32_t stored = amax > 0.f ? gck_stored(GCK_INT8_PLAIN, escaped, 0, amax * scale) : 0u;
    const gck_packed_scale s = {
        (amax > 0.f ? stored - (uint32_t)(k * 128) : 0u) | (escaped ? GCK_ESC : 0u),
        escaped,
        scale,
        amax > 0.f ? gck_multiplier(GCK_INT8_PLAIN, escaped, stored) : 0.f,
    };

    return s;
}

GCK_FN uint8_t gck_packed_code_of(float v, gck_dtype dtype, gck_packed_scale s)
{
    const int negative = gck_bits(v) >> 31 != 0;

    if (gck_escapes(v, dtype)) {
        const int kind = gck_escape_kind(v, dtype);
        return gck_escape_code(GCK_INT8_PLAIN, kind < 5 ? kind : 3 + negative);
    }
    const uint8_t code = gck_code(GCK_INT8_PLAIN, s.escaped, v * s.scale, s.factor, GCK_NEAREST);
    return code != 0 ? code : negative ? (uint8_t)0xFF : (uint8_t)1;
}

/* A scale that only damaged payloads have means step 0, with escapes. */
GCK_FN uint32_t gck_packed_side(uint32_t side) { return side == GCK_ESC_TABLE ? GCK_ESC : side; }

/* The smallest value of a sign, as bits. */
GCK_FN uint32_t gck_least_bits(int negative, gck_dtype dtype)
{
    return 1u | (uint32_t)(negative != 0) << (dtype == GCK_F32 ? 31 : 15);
}

#endif
