/* group.h: the payload of the group codecs, group by group.
 *
 * This header and those it includes are the format.  They are compiled as C for the host
 * reference and as device code by the .cu files, so that there is one text for both; the
 * SIMD files call it for every group that is not ordinary.
 *
 * Payload of n values, G = ceil(n / 128) groups, the last one padded with zeros:
 *
 *     codes    uint8_t  code[G][C];        C = 128, int6 96, int4 64: see gck_pack_codes()
 *     scales   uint16_t side[G][W];        W = 1, int4 2: the scale, and int4's outlier
 *              int8_t   row[r];            of r rows that count, else none: rows.h
 *
 * `scale` is the upper half of a float32, without a sign:
 *
 *      15    14 ........ 7   6 ....... 0
 *     [esc] [ exponent    ] [ mantissa   ]     stored = 2^32 x the group's step s
 *                                              (fp8_e5m2: 2^40 x s; int4, not rotated: 2^28 x s)
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
 * They take no part in amax.
 *
 * Not rotated formats: a group with an escape has esc = 1, and one of two forms:
 *   A (exponent < 255): as the ordinary group, but the largest codes are taken for the escapes:
 *                             NaN    +-Inf       +-MAX      amax maps to
 *       int8_plain           -128   +-127       +-126        +-125
 *       fp8_e4m3             0x7F   0x7E/0xFE   0x7D/0xFD      384
 *       fp8_e5m2             0x7E   0x7C/0xFC   0x7D/0xFD    57344
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
 *
 * Rotated formats: a group that is not ordinary has esc = 1 in side[0]; of int4, side[1] has an
 * exponent of ones, and its other eight bits, the sign as the upper one, are the first bits of the
 * header of a centred group or one with outliers, else zero.  Form B as above; the others by the
 * lowest bits of the scale:
 *     ...mmmmm00  centred                     scale: 5 bits of mantissa
 *     ...mmmmm10  with outliers
 *     ...mmmm001  plain: with escapes, or amax(y) (int4: amax) below 2^-80
 *     ...mmmm011  sentinel                    scale: 4 bits of mantissa, of 2^32 s (int4: 2^28 s)
 *     ...mmmm101  mask
 *     ...mmmm111  clusters
 *
 *   Centred, with outliers: rotated as the ordinary group (int6: not uniform; int4: no value apart),
 *     but of x - mean, and 0 where an outlier was.  A header takes the lowest bits of codes: its bit
 *     b is bit b / 128 of code b % 128 (int4: from bit 8 on, with b - 8 for b).  A code that lost its
 *     lowest bit means the middle of its two values; one that lost two bits the middle of its four,
 *     of levels the second of them.  Codes of step 0 are 0, but for the header.  The header:
 *         centred         mean
 *         with outliers   [n - 1: 3][has a mean: 1] mean, if so; then
 *             n <= 2      n times [at: 7][float32: 32]
 *             n > 2       [E: 8], n times [at: 7][mantissa: 7][e: 4][sign: 1]: a bfloat16 (to nearest
 *                         even) of exponent E - e, E the largest; e = 15: smaller ones, which become
 *                         zero (of their sign, mantissa 0)
 *         the outlier farthest from the mean first
 *     mean: [0][mantissa: 3][e: 3][sign: 1][all: 1] or [1][mantissa: 7][e: 4][sign: 1][all: 1], of exponent
 *     e - 25 + that of the scale.  all: no value has the other sign; what decodes to such is 0.
 *   The others: codes below Q, four to a little-endian number of 4 x 8 (6, 4) bits, code 0 lowest, as
 *     digits to the base Q; the numbers' uppermost h bits are the header, those of number 0 first:
 *                   h    Q: int8, int6, int4   far levels    header
 *         plain     0      256   64   16           0
 *         sentinel  1      215   53   13           1         [far: float32]
 *         mask      1      215   53   13       4, 2, 2       [far: its upper 24 bits][f: 8]
 *         clusters  2      181   45   11      64, 16, 4      [far: 32][f: 12][centre: 16][kinds: 1][-f: 1][sign: 2]
 *     f of a mask is 2^(field - 127), of clusters a float32 whose first 12 bits after the sign are the
 *     field, and its sign the last bit; centre is a bfloat16.
 *     `kinds` escapes are 5 in plain groups and where that bit is set (then far levels is 1), else 0;
 *     top = (Q - far levels - kinds - 1) / 2, rounded down.  Code c:
 *         c <= 2 top            (c - top) s, plus centre; 0 if that has not the sign (1: positive, 3: negative)
 *         then far levels       far + number x f
 *         then kinds            NaN, +Inf, -Inf, +MAX, -MAX
 * docs/codecs.md says which form a group has.
 *
 * Every float operation below is IEEE float32, to nearest even, subnormals kept,
 * nothing contracted.  Source of the FP8 formats: OCP 8-bit Floating Point
 * Specification 1.0; of the rotation: Ashkboos et al. 2024, arXiv:2404.00456. */
#ifndef GRADCKPT_GROUP_H
#define GRADCKPT_GROUP_H

#include "codec/format/centred.h"
#include "codec/format/classes.h"

/* ---- rotated formats ---- */

/* More than so many of 128 t that are large mean uniform levels.  Large: t >= 64 or t < -64, so that the
 * upper two bits differ. */
enum { GCK_MANY_LARGE = 48 };

/* Index of the largest |x|, the first of them; its bits without the sign in *amax. */
GCK_FN int gck_largest(const float *x, uint32_t *amax)
{
    int at = 0;

    *amax = gck_bits(gck_largest_of(x, GCK_GROUP));
    for (int i = GCK_GROUP - 1; i >= 0; i--) {
        at = (gck_bits(x[i]) & 0x7FFFFFFFu) == *amax ? i : at;
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

/* Looks at a group: is it one that gck_centre() or gck_classify() may store better?  Of its first 32
 * values the signs are counted.  largest: of |x|; amax: of the ordinary y. */
enum { GCK_SIGNS = 32, GCK_FEW_NEGATIVE = 8, GCK_MANY_NEGATIVE = 24 };
#define GCK_PEAKED 9.f           /* amax / largest: below, if few values are large */
#define GCK_FLAT   20.f          /* above */

GCK_FN int gck_is_doubtful(const float *x, float largest, float amax)
{
    int32_t lowest = 0, highest = 0;
    int negative = 0, far = 0;

    for (int i = 0; i < GCK_GROUP; i++) {
        const int32_t key = gck_key(x[i]);
        lowest = key < lowest ? key : lowest;
        highest = key > highest ? key : highest;
    }
    for (int i = 0; i < GCK_SIGNS; i++) {
        negative += (int)(gck_bits(x[i]) >> 31);
    }
    const float low = gck_of_key(lowest), high = gck_of_key(highest);
    if (negative < GCK_FEW_NEGATIVE || negative > GCK_MANY_NEGATIVE || 4.f * (high < -low ? high : -low) < largest
        || amax > GCK_FLAT * largest) {
        return 1;
    }
    if (amax >= GCK_PEAKED * largest) {
        return 0;
    }
    for (int i = 0; i < GCK_GROUP; i++) {
        far += 4.f * gck_abs(x[i]) >= largest;
    }
    return far <= GCK_MOST_OUTLIERS;
}

/* Encode a doubtful group in the form whose error is least; 0 when that is the ordinary one: when it is
 * more than `bound` of that of a group of this step.  That form may change signs: no group of one sign has it,
 * but where stochastic rounding needs it. */
GCK_SLOW_FN int gck_encode_doubtful(gck_format format, const float *values, gck_dtype dtype, uint32_t stored,
                                    float bound, int pattern, const uint16_t *noise, uint8_t *codes,
                                    uint16_t *side)
{
    const gck_extent e = gck_extent_of(values, gck_limit(dtype), gck_bits(gck_max_value(dtype)));
    gck_classes classes;
    gck_centred centred = {0.f, 0, 0, 0, {0}, 0u};
    float y[GCK_GROUP];
    const float apart = gck_classify(format, &e, stored, noise != NULL, &classes);
    const int exact = apart == 0.f, few = exact && classes.near <= GCK_MOST_OUTLIERS;
    const int one_sign = noise == NULL && gck_sign_of_all(&e) != 0;
    const float beside = noise != NULL || (exact && !few) ? 0x1p100f     /* a header is a bias */
                       : gck_centre(format, values, one_sign, stored, pattern, &centred, y);
    const float most = one_sign ? GCK_ANY : bound;

    if (!(apart < most) && !(beside < most)) {
        return 0;
    }
    if (apart <= beside && !(few && beside == 0.f)) {
        gck_encode_classes(format, &classes, values, dtype, noise, codes, side);
    } else {
        gck_encode_centred(format, &centred, values, y, codes, side);
    }
    return 1;
}

#define GCK_INT4_LOST 12.f       /* steps: the end of the innermost cell */

/* Field of int4's side[0] for a step, and back. */
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

/* int4 stores the largest value apart, and the rest rotated. */
GCK_SLOW_FN void gck_encode_rotated(gck_format format, const void *x, gck_dtype dtype, int count, int pattern,
                                    const uint16_t *noise, uint8_t *codes, uint16_t *side)
{
    float y[GCK_GROUP], values[GCK_GROUP];
    uint8_t code[GCK_GROUP];
    uint32_t largest;

    gck_load_group(x, dtype, count, values);
    const int at = gck_largest(values, &largest), is_int4 = format == GCK_INT4;
    const int special = largest > gck_limit(dtype);
    const float amax = special ? 0.f : gck_rotate(values, is_int4 ? at : -1, pattern, y);
    const float size = is_int4 && !special ? gck_float(largest) : amax;

    if (special || (size > 0.f && size < GCK_TINY)) {
        gck_encode_unrotated_form(format, x, count, values, dtype, noise, codes, side);
        return;
    }
    const float v = largest > 0 ? values[at] : 0.f;
    const uint32_t outlier = is_int4 && largest > 0 ? gck_int4_outlier(v, noise != NULL ? noise[at] : GCK_NEAREST) : 0u;
    const uint32_t low = is_int4 && largest > 0 ? gck_int4_low(outlier) << 3 : 0u;   /* the least step a field has */
    const uint32_t wanted = amax > 0.f ? gck_stored(format, 0, noise != NULL, amax) : 0u;
    const int lost = wanted < low;                       /* 2^28 and more below the outlier */
    const uint32_t stored = !lost ? wanted : amax * gck_inverse(format, 0, low) < GCK_INT4_LOST ? 0u : low;

    if (wanted > 0 && (lost || gck_is_doubtful(values, gck_float(largest), amax))
        && gck_encode_doubtful(format, values, dtype, wanted, lost ? GCK_ANY : GCK_BETTER, pattern, noise, codes,
                               side)) {
        return;
    }
    const float inv = stored > 0 ? gck_inverse(format, 0, stored) : 0.f;
    const int uniform = format == GCK_INT6 && gck_count_large(y, inv, noise != NULL) > GCK_MANY_LARGE;

    gck_codes_of(format, y, stored, uniform, inv, noise, code);
    gck_pack_codes(format, code, codes);
    if (is_int4) {
        side[0] = (uint16_t)((largest > 0 ? at << 9 : 0) | (stored > 0 ? (int)((stored - low) >> 3) + 1 : 0));
        side[1] = (uint16_t)outlier;
    } else {
        side[0] = (uint16_t)(stored | (uint32_t)uniform);
    }
}

/* ---- every group ---- */

/* The reference encoder: gck_code_bytes() codes and gck_side_words() words beside them, from
 * `count` values.  group: its index in the tensor.  noise: 16 bits for each of 128 values; NULL
 * rounds to nearest. */
GCK_FN void gck_encode_group(gck_format format, const void *x, gck_dtype dtype, int count, int64_t group,
                             const uint16_t *noise, uint8_t *codes, uint16_t *side)
{
    if (gck_is_rotated(format)) {
        gck_encode_rotated(format, x, dtype, count, gck_pattern(group), noise, codes, side);
    } else {
        gck_encode_unrotated(format, x, dtype, count, noise, codes, side);
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
    uint8_t code[GCK_GROUP];

    gck_unpack_codes(format, codes, code);
    for (int i = 0; i < GCK_GROUP; i++) {
        value[i] = gck_has_levels(format) ? gck_level_value(format, (int)(scale & 1u), code[i]) : (int8_t)code[i];
    }
    gck_unrotate(value, gck_float(stored << 16) * (gck_has_levels(format) ? 0x1p-33f : 0x1p-32f), 0.f, 0, pattern, x,
                 dtype, count);
    if (format == GCK_INT4 && (int)(scale >> 9) < count) {
        gck_store(x, dtype, (int)(scale >> 9), gck_float((uint32_t)side[1] << 16));
    }
}

/* Rotated formats: is the group none of those above? */
GCK_FN int gck_is_unusual(gck_format format, const uint16_t *side)
{
    return format == GCK_INT4 ? (side[1] & GCK_INT4_UNUSUAL) == GCK_INT4_UNUSUAL : (side[0] & GCK_ESC) != 0;
}

/* For callers that have a whole group's amax(y), not tiny: encode it, unless it is ordinary: 0. */
GCK_HOT_FN int gck_encode_unusual(gck_format format, const void *x, gck_dtype dtype, float amax, int64_t group,
                                  const gck_dither *dither, uint8_t *codes, uint16_t *side)
{
    float values[GCK_GROUP];
    uint16_t noise[GCK_GROUP];

    gck_load_group(x, dtype, GCK_GROUP, values);
    const float largest = gck_largest_of(values, GCK_GROUP);
    const int special = gck_bits(largest) > gck_limit(dtype);
    if (!special && !gck_is_doubtful(values, largest, amax)) {
        return 0;
    }
    if (dither != NULL) {
        gck_noise_of_group(dither, group, noise);
    }
    if (special) {
        gck_encode_unrotated_form(format, x, GCK_GROUP, values, dtype, dither != NULL ? noise : NULL, codes, side);
        return 1;
    }
    return gck_encode_doubtful(format, values, dtype, gck_stored(format, 0, dither != NULL, amax), GCK_BETTER,
                               gck_pattern(group), dither != NULL ? noise : NULL, codes, side);
}

/* The reference decoder of one group: writes its first `count` values to x. */
GCK_FN void gck_decode_group(gck_format format, const uint8_t *codes, const uint16_t *side, int64_t group, void *x,
                             gck_dtype dtype, int count)
{
    if (!gck_is_rotated(format)) {
        gck_decode_unrotated(format, codes, side[0], x, dtype, count);
    } else if (!gck_is_unusual(format, side)) {
        gck_decode_rotated(format, codes, side, gck_pattern(group), x, dtype, count);
    } else if (side[0] == GCK_ESC_TABLE) {
        gck_decode_table(format, codes, x, dtype, count);
    } else if (side[0] & GCK_UNROTATED) {
        gck_decode_classes(format, codes, side, x, dtype, count);
    } else {
        gck_decode_centred(format, codes, side, gck_pattern(group), x, dtype, count);
    }
}

#endif
