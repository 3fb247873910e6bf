/* group.h: the payload of the group codecs, group by group.
 *
 * This header and those it includes are the format.  They are compiled as C for the host
 * reference and as device code by the .cu files, so that there is one text for both; the
 * SIMD files call it for every group that is not ordinary.
 *
 * Payload of n values, G = ceil(n / 128) groups, the last one padded with zeros:
 *
 *     uint8_t  code[G][C];        offset 0; C = 128, int6 96, int4 64: see gck_pack_codes()
 *     uint16_t side[G][W];        offset C G; W = 1, int4 2: the scale, and int4's outlier
 *
 * `scale` is the upper half of a float32, without a sign:
 *
 *      15    14 ........ 7   6 ....... 0
 *     [esc] [ exponent    ] [ mantissa   ]     stored = 2^32 x the group's step s
 *                                              (fp8_e5m2: 2^40 x s; int4, form A: 2^28 x s)
 *
 * The offset lets the steps of every float32 amax, subnormal ones included, be normal
 * numbers of 8 exponent bits; 0 is the step of a zero group.
 *
 * Ordinary group (esc = 0): x' = value(code) * s, in float32, rounded once to the dtype.
 *   fp8_*       value(code) is the OCP FP8 value; s = amax / MAX, nearest.
 *   int8_plain  value(code) is the signed byte;   s = amax / 127, rounded up.
 *   int8        y = H (d o x) with H the 128-point Hadamard matrix (natural order,
 *               entries +-1) and d the signs of the group's pattern, below; the codes are those of
 *               y with step S = 128 s = amax(y) / 127, rounded up;
 *               x' = d o (H code) * s: integers until the last multiplication.
 *   int6        the same y and S; the codes name levels (codebook.h).  S has 6 bits of
 *               mantissa, and bit 0 of the scale says which levels: 1 for a group of which
 *               more than 48 of the 128 y are beyond half the step's reach: one with an outlier.
 *   int4        the value x[at] largest in size (the first of them) is stored as bfloat16
 *               and the rest rotated with a zero in its place.  S has 4 bits of mantissa.
 *                   side[0]  [at: 7 bits][field: 9 bits]
 *                   side[1]  x[at]; E its 8 bits of exponent
 *               The upper 12 bits of stored are q = field - 1 + 16 (E - 5): S reaches from
 *               2^-31 to twice what it can be.  field 0: the rest is zero, or so small that
 *               amax(y) is less than 12 of the least steps: all in the innermost cells.
 *
 * A value escapes when it is NaN, infinite, beyond 1e30, or the dtype's largest
 * finite value: no activation, but masks merged into biases hold such things.
 * They take no part in amax.  A group that holds one has esc = 1 (int4: side[1] =
 * 0x7F80, and side[0] is the scale) and is stored unrotated, in one of two forms:
 *   A (exponent < 255): as the ordinary group of fp8_* or int8_plain, but the largest
 *     codes are taken for the escapes:      NaN    +-Inf       +-MAX      amax maps to
 *       int8, int8_plain                   -128   +-127       +-126        +-125
 *       int6                                -32    +-31        +-30         +-29
 *       int4                                 -8     +-7         +-6          +-5
 *       fp8_e4m3                           0x7F   0x7E/0xFE   0x7D/0xFD      384
 *       fp8_e5m2                           0x7E   0x7C/0xFC   0x7D/0xFD    57344
 *     (MAX: the dtype's largest finite value).
 *   B (scale = 0xFF80): some value lies between 1e30 and MAX.  In bytes, b = 7 (int6: 5):
 *       0 .. 16 b - 1   128 codes of b bits, little-endian bit order
 *       16 b ..         float32, 2^32 x the step amax / 59 (int6: 2^24 x amax / 11)
 *       16 b + 4 ..     float32 table[3]: the distinct such values, by first appearance
 *     code c: c <= 118 is c - 59 steps; 119 NaN, 120 +Inf, 121 -Inf, 122 +MAX,
 *     123 -MAX, 124..126 table[c - 124] (int6: 22, 11, 23, ...).  A fourth distinct value
 *     becomes +-MAX.
 *     int4: b = 3; c <= 2 is c - 1 steps amax, stored x 2^24; 3 NaN, 4 +Inf, 5 -Inf, 6, 7
 *     table[0 .. 1], which has +-MAX too; a third distinct value becomes +-MAX: that is what the
 *     code of an infinity says whose bit (1 +Inf, 2 -Inf) is set in the word table[2].  Of a group
 *     that has that infinity, it becomes the first entry of its sign; where both have the other,
 *     its first value is the second.
 * The rotated formats also use form A for a group whose amax(y) (int4: amax) is below 2^-80.
 *
 * Outlier (int8 and int6, scale = 0xFF81): one value is so large that at least 124 of the
 * y are beyond half the step's reach, and without it amax(y) is less than a quarter.  It is
 * stored exactly, a zero in its place:
 *     bit b = 0..55 of  [value as float32: 55..24][scale: 23..8][0][at: 6..0]
 *     is the lowest bit of code b; those codes are twice as coarse: see gck_outlier_value().
 *
 * Every float operation below is IEEE float32, to nearest even, subnormals kept,
 * nothing contracted.  Source of the FP8 formats: OCP 8-bit Floating Point
 * Specification 1.0; of the rotation: Ashkboos et al. 2024, arXiv:2404.00456. */
#ifndef GRADCKPT_GROUP_H
#define GRADCKPT_GROUP_H

#include "codec/format/codebook.h"
#include "codec/format/escapes.h"
#include "codec/format/rotate.h"

/* ---- int8, int6 ---- */

/* More than MANY of 128 t that are large mean uniform levels; at least MOST mean an outlier.
 * Large: t >= 64 or t < -64, so that the upper two bits differ. */
enum { GCK_MANY_LARGE = 48, GCK_MOST_LARGE = 124 };

/* Index of the largest |x|, the first of them; its bits without the sign in *amax. */
GCK_FN int gck_largest(const void *x, gck_dtype dtype, int count, uint32_t *amax)
{
    int at = 0;

    *amax = 0;
    for (int i = 0; i < count; i++) {
        const uint32_t abs = gck_bits(gck_load(x, dtype, i)) & 0x7FFFFFFFu;
        if (abs > *amax) {
            *amax = abs;
            at = i;
        }
    }
    return at;
}

/* How many of y, in steps, round to t >= 64 or t < -64: the upper two bits differ. */
GCK_FN int gck_count_large(const float *y, float inv, int noisy)
{
    int n = 0;

    for (int i = 0; i < GCK_GROUP; i++) {
        if (noisy) {
            const float p = y[i] * inv;
            n += p >= 63.5f || p < -64.5f;
        } else {
            const int t = gck_round_product(y[i], inv);
            n += t >= 64 || t < -64;
        }
    }
    return n;
}

/* Encode y, whose amax gives the step of the rotated codes; bit 0 of int6's is `uniform`. */
GCK_SLOW_FN void gck_encode_codes(gck_format format, const float *y, uint32_t stored, int uniform, float inv,
                                  const uint16_t *noise, uint8_t *codes)
{
    uint8_t code[GCK_GROUP];

    for (int i = 0; i < GCK_GROUP; i++) {
        code[i] = stored == 0 ? 0
                : !gck_has_levels(format)
                    ? gck_code(format, 0, y[i], inv, noise != NULL ? noise[i] : GCK_NEAREST)
                : noise == NULL ? gck_level_code(format, uniform, gck_round_product(y[i], inv), i)
                                : gck_level_code_noisy(format, uniform, y[i], inv, noise[i]);
    }
    gck_pack_codes(format, code, codes);
}

GCK_SLOW_FN void gck_encode_rotated(gck_format format, const void *x, gck_dtype dtype, int count, int pattern,
                                    const uint16_t *noise, uint8_t *codes, uint16_t *side)
{
    uint32_t largest;
    const int at = gck_largest(x, dtype, count, &largest);
    const int special = largest > gck_limit(dtype);
    float y[GCK_GROUP];
    float amax = special ? 0.f : gck_rotate(x, dtype, count, -1, pattern, y);

    if (special || (amax > 0.f && amax < GCK_TINY)) {
        gck_encode_unrotated(format, x, dtype, count, 1, noise, codes, side);
        return;
    }
    const uint32_t stored = amax > 0.f ? gck_stored(format, 0, noise != NULL, amax) : 0u;
    const float inv = amax > 0.f ? gck_inverse(format, 0, stored) : 0.f;
    const int large = gck_count_large(y, inv, noise != NULL);
    const int uniform = format == GCK_INT6 && large > GCK_MANY_LARGE;

    if (large >= GCK_MOST_LARGE) {
        const float rest = gck_rotate(x, dtype, count, at, pattern, y);
        if (4.f * rest < amax) {
            gck_encode_outlier(format, y, rest, at, gck_load(x, dtype, at), codes, side);
            return;
        }
        gck_rotate(x, dtype, count, -1, pattern, y);
    }
    gck_encode_codes(format, y, stored, uniform, inv, noise, codes);
    side[0] = (uint16_t)(stored | (uint32_t)uniform);
}

GCK_SLOW_FN void gck_decode_outlier(gck_format format, const uint8_t *codes, int pattern, void *x, gck_dtype dtype,
                                  int count)
{
    int32_t value[GCK_GROUP];
    uint64_t outlier = 0;

    for (int i = 0; i < GCK_GROUP; i++) {
        const uint8_t code = gck_packed_code(format, codes, i);
        value[i] = gck_outlier_value(format, code, i);
        outlier |= i < GCK_STOLEN ? (uint64_t)(code & 1u) << i : 0u;
    }
    const int at = (int)(outlier & 127u);
    gck_unrotate(value, gck_float((uint32_t)(outlier >> 8 & 0x7FFFu) << 16) * 0x1p-33f, pattern, x, dtype, count);
    if (at < count) {
        gck_store_escape(x, dtype, at, gck_float((uint32_t)(outlier >> 24)));
    }
}

/* ---- int4 ---- */

#define GCK_INT4_LOST 12.f       /* steps: the end of the innermost cell */

/* Field of side[0] for a step, and back. */
GCK_FN uint32_t gck_int4_low(uint32_t outlier) { return ((outlier >> 7 & 0xFFu) - 5u) << 4; }

GCK_FN uint32_t gck_int4_stored(uint32_t field, uint32_t outlier)
{
    return field == 0 ? 0u : ((field - 1u + gck_int4_low(outlier)) & 0xFFFu) << 3;
}

/* x[at] as bfloat16. */
GCK_FN uint32_t gck_int4_outlier(float v, int noise)
{
    return noise < 0 ? gck_to_bf16(v) : (gck_bits(v) + (uint32_t)noise) >> 16;
}

GCK_SLOW_FN void gck_encode_int4(const void *x, gck_dtype dtype, int count, int pattern, const uint16_t *noise,
                                 uint8_t *codes, uint16_t *side)
{
    uint32_t largest;
    const int at = gck_largest(x, dtype, count, &largest);
    float y[GCK_GROUP];

    if (largest > gck_limit(dtype) || (largest > 0 && gck_float(largest) < GCK_TINY)) {
        gck_encode_unrotated(GCK_INT4, x, dtype, count, 1, noise, codes, side);
        return;
    }
    const float v = largest > 0 ? gck_load(x, dtype, at) : 0.f;
    const uint32_t outlier = largest > 0 ? gck_int4_outlier(v, noise != NULL ? noise[at] : GCK_NEAREST) : 0u;
    const float amax = gck_rotate(x, dtype, count, at, pattern, y);
    const uint32_t low = largest > 0 ? gck_int4_low(outlier) << 3 : 0u;  /* the least step a field has */
    uint32_t stored = amax > 0.f ? gck_stored(GCK_INT4, 0, noise != NULL, amax) : 0u;

    if (stored < low) {                                  /* 2^28 and more below the outlier */
        stored = amax * gck_inverse(GCK_INT4, 0, low) < GCK_INT4_LOST ? 0u : low;
    }
    gck_encode_codes(GCK_INT4, y, stored, 0, stored > 0 ? gck_inverse(GCK_INT4, 0, stored) : 0.f, noise, codes);
    side[0] = (uint16_t)((largest > 0 ? at << 9 : 0) | (stored > 0 ? (int)((stored - low) >> 3) + 1 : 0));
    side[1] = (uint16_t)outlier;
}

/* ---- every group ---- */

/* The reference encoder: gck_code_bytes() codes and gck_side_words() words beside them, from
 * `count` values.  group: its index in the tensor.  noise: 16 bits for each of 128 values; NULL
 * rounds to nearest. */
GCK_FN void gck_encode_group(gck_format format, const void *x, gck_dtype dtype, int count, int64_t group,
                             const uint16_t *noise, uint8_t *codes, uint16_t *side)
{
    if (format == GCK_INT4) {
        gck_encode_int4(x, dtype, count, gck_pattern(group), noise, codes, side);
    } else if (gck_is_rotated(format)) {
        gck_encode_rotated(format, x, dtype, count, gck_pattern(group), noise, codes, side);
    } else {
        gck_encode_unrotated(format, x, dtype, count, 0, noise, codes, side);
    }
}

/* Ordinary rotated groups. */
GCK_FN void gck_decode_rotated(gck_format format, const uint8_t *codes, const uint16_t *side, int pattern, void *x,
                               gck_dtype dtype, int count)
{
    const uint32_t scale = side[0];
    const uint32_t stored = format == GCK_INT4 ? gck_int4_stored(scale & 511u, side[1])
                          : format == GCK_INT6 ? scale & ~1u : scale;
    int32_t value[GCK_GROUP];

    for (int i = 0; i < GCK_GROUP; i++) {
        const uint8_t code = gck_packed_code(format, codes, i);
        value[i] = gck_has_levels(format) ? gck_level_value(format, (int)(scale & 1u), code) : (int8_t)code;
    }
    gck_unrotate(value, gck_float(stored << 16) * (gck_has_levels(format) ? 0x1p-33f : 0x1p-32f), pattern, x, dtype,
                 count);
    if (format == GCK_INT4 && (int)(scale >> 9) < count) {
        gck_store(x, dtype, (int)(scale >> 9), gck_float((uint32_t)side[1] << 16));
    }
}

/* The reference decoder of one group: writes its first `count` values to x. */
GCK_FN void gck_decode_group(gck_format format, const uint8_t *codes, const uint16_t *side, int64_t group, void *x,
                             gck_dtype dtype, int count)
{
    const int unrotated = format == GCK_INT4 ? (side[1] & 0x7F80u) == GCK_INT4_UNROTATED
                        : !gck_is_rotated(format) || side[0] & GCK_ESC;

    if (!unrotated) {
        gck_decode_rotated(format, codes, side, gck_pattern(group), x, dtype, count);
    } else if (side[0] == GCK_ESC_OUTLIER && (format == GCK_INT8 || format == GCK_INT6)) {
        gck_decode_outlier(format, codes, gck_pattern(group), x, dtype, count);
    } else {
        gck_decode_unrotated(format, codes, side[0], x, dtype, count);
    }
}

#endif
