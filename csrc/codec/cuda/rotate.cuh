/* rotate.cuh: y = H (d o x) across the 8 lanes of a group, and back. */
#ifndef GRADCKPT_ROTATE_CUH
#define GRADCKPT_ROTATE_CUH

#include "codec/cuda/codebook.cuh"

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

/* Signed bytes as in codebook.cuh. */
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
