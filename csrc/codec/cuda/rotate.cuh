/* rotate.cuh: y = H (d o x) across the 8 lanes of a group, and back; codes and levels, four to a word. */
#ifndef GRADCKPT_ROTATE_CUH
#define GRADCKPT_ROTATE_CUH

#include "codec/cuda/lane_group.cuh"

/* ---- codes and levels: quantize.h's and codebook.h's functions, four values ----
 *
 * A byte holds a code, an integer t (|t| <= 127) or its size m = |t|; byte b of word w is
 * value 4 w + b of the lane.  Comparing bytes below 128: bit 7 of m + 128 - T is m >= T. */

/* The same in all four bytes. */
GCK_LANE_FN constexpr uint32_t four(uint32_t byte) { return byte * 0x01010101u; }

GCK_LANE_FN uint32_t at_least(uint32_t m, uint32_t threshold) { return m + four(128u - threshold); }

GCK_LANE_FN uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

/* The lowest bytes of four words. */
GCK_LANE_FN uint32_t lowest_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

GCK_LANE_FN uint32_t highest_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}

/* ---- t to codes and codes to levels ---- */

/* Sizes to gck_index(). */
template <gck_format FORMAT>
GCK_LANE_FN uint32_t indices(uint32_t m, uint32_t uniform)
{
    if (FORMAT == GCK_INT4) {                      /* how many thresholds: their parities */
        const uint32_t over12 = at_least(m, 12), over24 = at_least(m, 24), over36 = at_least(m, 36);
        const uint32_t over49 = at_least(m, 49), over64 = at_least(m, 64), over81 = at_least(m, 81);
        const uint32_t one = over12 ^ over24 ^ over36 ^ over49 ^ over64 ^ over81 ^ at_least(m, 103);
        const uint32_t two = over24 ^ over49 ^ over81;
        return (one >> 7 & four(1)) | (two >> 6 & four(2)) | (over49 >> 5 & four(4));
    }
    const uint32_t some = at_least(m, 1) >> 7 & four(1);
    const uint32_t fine = (m - some) >> 1 & four(0x3F), middle = (m >> 2 & four(0x1F)) + four(4);
    const uint32_t coarse = (m >> 3 & four(0xF)) + four(16);
    const uint32_t index = choose(ptx_byte_signs(at_least(m, 96)), coarse,
                                  choose(ptx_byte_signs(at_least(m, 18)), middle, fine));
    return uniform ? middle - four(4) : index;
}

/* Integers to gck_level_code(): value 4 w + b is even in its group where b is. */
template <gck_format FORMAT>
GCK_LANE_FN uint32_t level_codes(uint32_t t, uint32_t uniform)
{
    const uint32_t negative = ptx_byte_signs(t);
    const uint32_t m = (t ^ negative) + (negative & four(1));
    const uint32_t below = ~((t ^ four(0x80)) - 0x01000100u) & four(0x80);   /* t < (i & 1) */

    return indices<FORMAT>(m, uniform) | below >> (FORMAT == GCK_INT4 ? 4 : 2);
}

/* Codes to bytes B with gck_level_value() = 2 B + 1: L for the upper levels, -L - 1 for
 * the lower ones. */
GCK_LANE_FN uint32_t int6_levels(uint32_t codes, uint32_t uniform)
{
    const uint32_t index = codes & four(0x1F);
    const uint32_t fine = 2 * index + four(1);
    const uint32_t middle = (4 * index + four(128 - 15)) & four(0x7F);         /* right from index 4 on */
    const uint32_t coarse = (8 * index + four(256 - 125 - 128)) & four(0x7F);  /* right from 16 on */
    const uint32_t level = choose(ptx_byte_signs(at_least(index, 28)), coarse,
                                  choose(ptx_byte_signs(at_least(index, 8)), middle, fine));

    return (uniform ? 4 * index + four(1) : level) ^ ptx_byte_signs(codes << 2);
}

/* Four nibbles at once select among the eight levels; `even` and `odd` hold the sign of a
 * nibble in bit 7 of a byte. */
GCK_LANE_FN void int4_levels(uint32_t nibbles, uint32_t &lower, uint32_t &upper)
{
    const uint32_t index = nibbles & 0x77777777u;
    const uint32_t even = ptx_byte_signs(nibbles << 4), odd = ptx_byte_signs(nibbles);

    lower = __byte_perm(0x291D1105u, 0x73594737u, index) ^ __byte_perm(even, odd, 0x5140);
    upper = __byte_perm(0x291D1105u, 0x73594737u, index >> 16) ^ __byte_perm(even, odd, 0x7362);
}

/* ---- codes in memory ---- */

/* Bytes to nibbles, eight to a word, and back. */
GCK_LANE_FN uint32_t to_nibbles(uint32_t lower, uint32_t upper)
{
    lower &= four(0xF), upper &= four(0xF);
    return __byte_perm(lower | lower >> 4, upper | upper >> 4, 0x6420);
}

GCK_LANE_FN void from_nibbles(uint32_t nibbles, uint32_t &lower, uint32_t &upper)
{
    const uint32_t even = nibbles & four(0xF), odd = nibbles >> 4 & four(0xF);

    lower = __byte_perm(even, odd, 0x5140);
    upper = __byte_perm(even, odd, 0x7362);
}

/* int4's codes, a byte each, to levels. */
GCK_LANE_FN void int4_levels_of_bytes(uint32_t (&codes)[4])
{
    int4_levels(to_nibbles(codes[0], codes[1]), codes[0], codes[1]);
    int4_levels(to_nibbles(codes[2], codes[3]), codes[2], codes[3]);
}

/* Bits 4 and 5 of four bytes, one after the other, as the highest byte; and one byte of
 * them to bits 4 and 5. */
GCK_LANE_FN uint32_t to_upper_bits(uint32_t codes) { return (codes >> 4 & four(3)) * 0x01041040u; }

GCK_LANE_FN uint32_t from_upper_bits(uint32_t byte)
{
    const uint32_t two = (byte | byte << 12) & 0x000F000Fu;

    return (two | two << 6) << 4 & four(0x30);
}

/* `keep`: else all codes are 0, as in a zero group, where levels would have signs. */
template <gck_format FORMAT>
GCK_LANE_FN void pack_codes(const uint32_t (&codes)[4], bool keep, share<FORMAT> &s)
{
    if constexpr (share<FORMAT>::WORDS == 4) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            s.word[w] = codes[w];
        }
    } else {
        s.word[0] = to_nibbles(codes[0], codes[1]);
        s.word[1] = to_nibbles(codes[2], codes[3]);
    }
    if constexpr (share<FORMAT>::WORDS == 3) {
        s.word[2] = highest_bytes(to_upper_bits(codes[0]), to_upper_bits(codes[1]), to_upper_bits(codes[2]),
                                  to_upper_bits(codes[3]));
    }
#pragma unroll
    for (int w = 0; w < share<FORMAT>::WORDS; w++) {
        s.word[w] = keep ? s.word[w] : 0u;
    }
}

template <gck_format FORMAT>
GCK_LANE_FN void unpack_codes(const share<FORMAT> &s, uint32_t (&codes)[4])
{
    if constexpr (share<FORMAT>::WORDS == 4) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            codes[w] = s.word[w];
        }
    } else {
        from_nibbles(s.word[0], codes[0], codes[1]);
        from_nibbles(s.word[1], codes[2], codes[3]);
    }
    if constexpr (share<FORMAT>::WORDS == 3) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            codes[w] |= from_upper_bits(s.word[2] >> (8 * w) & 0xFFu);
        }
    }
}

/* ---- the rotation ---- */

/* The signs of this lane's 16 values of group g, bit j for value j. */
GCK_LANE_FN uint32_t lane_signs(int64_t g)
{
    const int lane = (int)threadIdx.x % LANES;

    return gck_sign_words[gck_pattern(g)][lane / 2] >> (16 * (lane % 2));
}

GCK_LANE_FN float negate_if(uint32_t signs, int j, float v)
{
    return gck_float(gck_bits(v) ^ (signs << (31 - j) & 0x80000000u));
}

/* y = H (d o x) in place, stages in the order of the index bits, as gck_hadamard(). */
GCK_LANE_FN void rotate(float (&y)[VALUES], int64_t g)
{
    const uint32_t signs = lane_signs(g);

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        y[j] = negate_if(signs, j, y[j]);
    }
#pragma unroll
    for (int h = 1; h < VALUES; h *= 2) {
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            if (!(j & h)) {
                const float a = y[j], b = y[j + h];
                y[j] = a + b;
                y[j + h] = a - b;
            }
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
        /* The upper lane has b and receives a: a - b.  The product by +-1 is exact. */
        const float sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            y[j] = __fmaf_rn(y[j], sign, __shfl_xor_sync(ALL_LANES, y[j], lanes));
        }
    }
}

/* ---- back: integers ----
 *
 * Sums are integers below 2^15 in size, so any order will do, and two travel in one word
 * as lower + upper * 2^16: half the additions, half the shuffles.  Pairs are values j and
 * j + 8; their own stage comes last. */
enum { PAIRS = VALUES / 2 };

GCK_LANE_FN int32_t paired(int32_t lower, int32_t upper) { return lower + upper * 65536; }

/* Signed bytes as above. */
GCK_LANE_FN void pairs_of_bytes(const uint32_t (&bytes)[4], int32_t (&pair)[PAIRS])
{
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        pair[j] = paired((int8_t)(bytes[j / 4] >> (8 * (j % 4))), (int8_t)(bytes[2 + j / 4] >> (8 * (j % 4))));
    }
}

GCK_LANE_FN void rotate_pairs(int32_t (&pair)[PAIRS], int32_t (&y)[VALUES])
{
#pragma unroll
    for (int h = 1; h < PAIRS; h *= 2) {
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            if (!(j & h)) {
                const int32_t a = pair[j], b = pair[j + h];
                pair[j] = a + b;
                pair[j + h] = a - b;
            }
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
        const int32_t sign = threadIdx.x & lanes ? -1 : 1;
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            pair[j] = pair[j] * sign + __shfl_xor_sync(ALL_LANES, pair[j], lanes);
        }
    }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int32_t lower = (int16_t)pair[j], upper = (pair[j] - lower) >> 16;
        y[j] = lower + upper;
        y[j + PAIRS] = lower - upper;
    }
}

/* x' = d o y * unit. */
GCK_LANE_FN void unrotated_values(const int32_t (&y)[VALUES], float unit, int64_t g, float (&v)[VALUES])
{
    const uint32_t signs = lane_signs(g);

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = negate_if(signs, j, (float)y[j] * unit);
    }
}

/* H of the levels 2 B + 1 is twice H B and this: H of ones is 128 in its first place and
 * 0 elsewhere. */
GCK_LANE_FN int32_t sum_of_halves(int lane) { return lane == 0 ? GCK_GROUP / 2 : 0; }

/* ---- a group ---- */

/* Puts a zero in place of the group's first value of size `amax`, its largest; its index. */
GCK_LANE_FN int take_largest(float (&v)[VALUES], uint32_t amax, float *taken)
{
    const int before = (int)threadIdx.x % LANES * VALUES;
    uint32_t after = 0;                            /* what is left of 2 x 128 past 2 x index + sign */

#pragma unroll
    for (int j = VALUES - 1; j >= 0; j--) {
        const uint32_t bits = gck_bits(v[j]);
        after = (bits & 0x7FFFFFFFu) == amax ? 2u * (uint32_t)(GCK_GROUP - before - j) - (bits >> 31) : after;
    }
    const uint32_t first = 2 * GCK_GROUP - group_max(after);
    *taken = gck_float(amax | first << 31);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = before + j == (int)(first / 2) ? 0.f : v[j];
    }
    return (int)(first / 2);
}

/* t = y * inv to nearest, four to a word: the lowest bytes of float32 integers near 2^23. */
GCK_LANE_FN void integers(const float (&y)[VALUES], float inv, uint32_t (&t)[4])
{
    const auto integer = [&](int j) { return gck_bits(__fmaf_rn(y[j], inv, 12582912.f)); };

#pragma unroll
    for (int w = 0; w < 4; w++) {
        t[w] = lowest_bytes(integer(4 * w), integer(4 * w + 1), integer(4 * w + 2), integer(4 * w + 3));
    }
}

/* Integers to codes; noisy: y to codes. */
template <gck_format FORMAT, bool NOISY>
GCK_LANE_FN void to_codes(const float (&y)[VALUES], float inv, uint32_t uniform, const gck_dither &dither, int64_t i,
                          uint32_t (&codes)[4])
{
    if constexpr (NOISY) {
        for_each_noise<NOISY>(dither, i, [&](int j, int noise) {
            const uint32_t code = FORMAT == GCK_INT8 ? gck_code(FORMAT, 0, y[j], inv, noise)
                                                     : gck_level_code_noisy(FORMAT, (int)uniform, y[j], inv, noise);
            codes[j / 4] |= code << (8 * (j % 4));
        });
    } else if constexpr (FORMAT != GCK_INT8) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            codes[w] = level_codes<FORMAT>(codes[w], uniform);
        }
    }
}

#endif
