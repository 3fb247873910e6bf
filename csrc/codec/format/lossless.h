/* lossless.h: the payload of `lossless`: a word for each value, with four bits in place of
 * the exponent.  This header is the format; the host kernels and lossless.cu share it.
 *
 * Payload of n values, G = ceil(n / 128) groups (the last one padded with zeros), in
 * B = ceil(n / 4096) blocks of 32 groups:
 *
 *     word     group[G][K-1][C];   offset 0; rows of words, see below
 *     uint8_t  arena[B][64];       exponents of a block's escaped values, by index; then 0
 *     uint8_t  base[G];            0: the block did not fit, and decodes to NaN
 *
 *                word   exponent  low bits   K rows x C columns   bytes of words   bits a value
 *     bfloat16   16     8         8          4 x 32               192              12.1875
 *     float16    16     5         11         16 x 8               240              15.1875
 *     float32    32     8         24         8 x 16               448              28.1875
 *
 * A value is rotated left by one bit, so that its exponent is on top and its sign bit 0:
 *
 *     [ exponent ][ mantissa .. sign ]     ->     [ code ][ mantissa .. sign ]
 *                   the low bits                    4       the low bits        = 12, 15, 28 bits
 *
 *     code 0        exponent 0 (zero, subnormal)
 *     code 1        escaped: the exponent is in the arena
 *     code 2..15    exponent = base - 15 + code
 *
 * Value r C + c of a group is row r, column c.  The coded values of rows 0 .. K-2 are
 * the lower bits of the words; those of row K-1 are cut into pieces of 4 bits (float16: 1),
 * and piece r lies above row r:
 *
 *     bfloat16, column c:    row 0  [ 3..0  of row 3 ][ 12 bits of row 0 ]
 *                            row 1  [ 7..4  of row 3 ][ 12 bits of row 1 ]
 *                            row 2  [ 11..8 of row 3 ][ 12 bits of row 2 ]
 *
 * The base of a group is an exponent of the group, but at least 14, so that the 14
 * exponents that have a code are all above 0.  It is the largest exponent of its finite
 * values (if it has none above 0, that of infinity and NaN, if it has those).  When more
 * than two values escape from that, it is the one of all the group's exponents from which
 * the fewest do: one huge value does not push the others out.  Among equals the first one
 * counts, then the larger.
 *
 * More than 64 escapes in a block: the tensor does not fit. */
#ifndef GRADCKPT_LOSSLESS_H
#define GRADCKPT_LOSSLESS_H

#include "codec/format/float_bits.h"

enum {
    GCK_BLOCK_GROUPS = GCK_BLOCK / GCK_GROUP,
    GCK_ARENA = 64,
    GCK_WINDOW = 14,               /* exponents that have a code */
    GCK_TOP_CODE = 15,             /* the base's                 */
    GCK_ESCAPE_CODE = 1,
};

GCK_LAYOUT_FN int gck_word_bits(gck_dtype dtype) { return dtype == GCK_F32 ? 32 : 16; }
GCK_LAYOUT_FN int gck_low_bits(gck_dtype dtype) { return dtype == GCK_F32 ? 24 : dtype == GCK_F16 ? 11 : 8; }
GCK_LAYOUT_FN int gck_spare_bits(gck_dtype dtype) { return gck_word_bits(dtype) - gck_low_bits(dtype) - 4; }
GCK_LAYOUT_FN int gck_rows(gck_dtype dtype) { return gck_word_bits(dtype) / gck_spare_bits(dtype); }
GCK_LAYOUT_FN int gck_columns(gck_dtype dtype) { return GCK_GROUP / gck_rows(dtype); }
GCK_LAYOUT_FN int gck_group_words(gck_dtype dtype) { return GCK_GROUP - gck_columns(dtype); }
GCK_LAYOUT_FN int gck_group_bytes(gck_dtype dtype) { return gck_group_words(dtype) * gck_word_bits(dtype) / 8; }

GCK_FN uint32_t gck_word_mask(gck_dtype dtype) { return dtype == GCK_F32 ? 0xFFFFFFFFu : 0xFFFFu; }
GCK_FN uint32_t gck_low_mask(gck_dtype dtype) { return (1u << gck_low_bits(dtype)) - 1u; }

/* The exponent of infinity and NaN. */
GCK_FN uint32_t gck_special(gck_dtype dtype) { return dtype == GCK_F16 ? 31u : 255u; }

GCK_FN uint32_t gck_quiet_nan(gck_dtype dtype)
{
    return dtype == GCK_F32 ? 0x7FC00000u : dtype == GCK_F16 ? 0x7E00u : 0x7FC0u;
}

/* The bits of a value, rotated, and back. */
GCK_FN uint32_t gck_rotated(uint32_t bits, gck_dtype dtype)
{
    return (bits << 1 | bits >> (gck_word_bits(dtype) - 1)) & gck_word_mask(dtype);
}

GCK_FN uint32_t gck_unrotated(uint32_t word, gck_dtype dtype)
{
    return word >> 1 | (word << (gck_word_bits(dtype) - 1) & gck_word_mask(dtype));
}

/* The base for an exponent, so that the 14 exponents are all above 0. */
GCK_FN uint32_t gck_base_of(uint32_t exponent) { return exponent > GCK_WINDOW ? exponent : (uint32_t)GCK_WINDOW; }

GCK_FN int gck_is_escaped(uint32_t exponent, uint32_t base)
{
    return exponent != 0 && (exponent > base || exponent + GCK_WINDOW <= base);
}

/* The code of a rotated value, above its low bits. */
GCK_FN uint32_t gck_coded(uint32_t rotated, uint32_t base, gck_dtype dtype)
{
    const uint32_t exponent = rotated >> gck_low_bits(dtype);
    const uint32_t code = exponent == 0 ? 0u
                        : gck_is_escaped(exponent, base) ? (uint32_t)GCK_ESCAPE_CODE
                                                         : exponent + GCK_TOP_CODE - base;

    return code << gck_low_bits(dtype) | (rotated & gck_low_mask(dtype));
}

/* The bits of a value; `escape` is its exponent in the arena, if it has one there. */
GCK_FN uint32_t gck_uncoded(uint32_t coded, uint32_t base, uint32_t escape, gck_dtype dtype)
{
    const uint32_t code = coded >> gck_low_bits(dtype);
    const uint32_t exponent = code == 0 ? 0u : code == GCK_ESCAPE_CODE ? escape : base + code - GCK_TOP_CODE;
    const uint32_t word = (exponent << gck_low_bits(dtype) | (coded & gck_low_mask(dtype))) & gck_word_mask(dtype);

    return base < GCK_WINDOW ? gck_quiet_nan(dtype) : gck_unrotated(word, dtype);
}

/* The parts of a payload: of the whole, or from some block on. */
typedef struct {
    uint8_t *words, *arenas, *bases;
} gck_lossless_parts;

static inline gck_lossless_parts gck_parts_of(const void *payload, int64_t numel, gck_dtype dtype, int64_t first_block)
{
    const int64_t groups = gck_groups_of(numel);
    const int64_t blocks = numel / GCK_BLOCK + (numel % GCK_BLOCK != 0);
    uint8_t *words = (uint8_t *)payload, *arenas = words + groups * gck_group_bytes(dtype);
    uint8_t *bases = arenas + blocks * GCK_ARENA;
    const gck_lossless_parts parts = {
        words + first_block * GCK_BLOCK_GROUPS * gck_group_bytes(dtype),
        arenas + first_block * GCK_ARENA,
        bases + first_block * GCK_BLOCK_GROUPS,
    };

    return parts;
}

#endif
