/* outlier.cuh: what int8 and int6 share: rotated groups, with or without an outlier. */
#ifndef GRADCKPT_OUTLIER_CUH
#define GRADCKPT_OUTLIER_CUH

#include "codec/cuda/group_kernels.cuh"
#include "codec/cuda/rotate.cuh"

/* How many of a lane's 16 integers differ in their upper two bits. */
GCK_LANE_FN int count_large(const uint32_t (&t)[4])
{
    uint32_t large = 0;

#pragma unroll
    for (int w = 0; w < 4; w++) {
        large |= ((t[w] ^ t[w] << 1) & four(0x80)) >> w;
    }
    return __popc(large);
}

/* Which of this lane's codes lend their lowest bit to an outlier, bit j for value j. */
GCK_LANE_FN uint32_t stolen_of_lane(int lane) { return lane < 3 ? 0xFFFFu : lane == 3 ? 0xFFu : 0u; }

/* gck_encode_outlier(): y, its amax `rest`, and what stood at `at`. */
template <gck_format FORMAT>
GCK_LANE_FN void encode_outlier(const float (&y)[VALUES], uint32_t rest, int at, float taken, share<FORMAT> &s)
{
    const int lane = (int)threadIdx.x % LANES;
    const bool kept = gck_float(rest) >= GCK_TINY;
    const uint32_t stored = kept ? gck_stored(FORMAT, 0, 0, gck_float(rest)) : 0u;
    const uint64_t outlier = (uint64_t)at | (uint64_t)stored << 8 | (uint64_t)gck_bits(taken) << 24;
    const uint32_t stolen = stolen_of_lane(lane), bits = lane < 4 ? (uint32_t)(outlier >> (16 * lane)) : 0u;
    uint32_t codes[4];

    integers(y, kept ? gck_inverse(FORMAT, 0, stored) : 0.f, codes);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        codes[w] = FORMAT == GCK_INT8 ? codes[w] : level_codes<FORMAT>(codes[w], 1);
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const uint32_t bit = 1u << (8 * b);
            const int j = 4 * w + b;
            codes[w] = stolen >> j & 1u ? (codes[w] & ~bit) | (bits >> j & 1u) << (8 * b) : codes[w];
        }
    }
    pack_codes<FORMAT>(codes, true, s);
    s.side = GCK_ESC_OUTLIER;
}

/* Of a group that is not ordinary: amax(y) and, in bit 31, whether as many y are large as a
 * outlier makes so.  The values, read once more, say what it is. */
constexpr uint32_t MOST_ARE_LARGE = 0x80000000u;

template <gck_format FORMAT, typename VIEW>
GCK_LANE_FN answer reconsider_rotated(const VIEW &x, int64_t i, uint32_t doubt, share<FORMAT> &s)
{
    const float amax = gck_float(doubt & ~MOST_ARE_LARGE);
    float v[VALUES], taken;

    load_values(x, i, v);
    const uint32_t largest = group_max(lane_amax(v));
    const int at = take_largest(v, largest, &taken);
    rotate(v, i / GCK_GROUP);
    const uint32_t rest = group_max(lane_amax(v));

    if (largest > gck_limit(x.dtype()) || (amax > 0.f && amax < GCK_TINY)) {
        return ODD;
    }
    if (!(doubt & MOST_ARE_LARGE) || 4.f * gck_float(rest) >= amax) {
        return RIGHT;
    }
    encode_outlier<FORMAT>(v, rest, at, taken, s);
    return BETTER;
}

template <gck_format FORMAT, bool NOISY, typename VIEW>
GCK_LANE_FN uint32_t encode_rotated(const VIEW &x, int64_t i, const gck_dither &dither, share<FORMAT> &s)
{
    float y[VALUES];
    uint32_t codes[4] = {}, uniform = 0;
    int large = 0;

    load_values(x, i, y);
    rotate(y, i / GCK_GROUP);
    const uint32_t amax = group_max(lane_amax(y));
    const uint32_t stored = gck_stored(FORMAT, 0, NOISY, gck_float(amax));
    const float inv = amax == 0 ? 0.f : gck_inverse(FORMAT, 0, stored);

    if constexpr (NOISY) {
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            const float p = y[j] * inv;
            large += p >= 63.5f || p < -64.5f;
        }
    } else {
        integers(y, inv, codes);
        large = count_large(codes);
    }
    large = lanes_sum(large);
    uniform = FORMAT == GCK_INT6 && large > GCK_MANY_LARGE;
    if constexpr (NOISY) {
        for_each_noise<NOISY>(dither, i, [&](int j, int noise) {
            const uint32_t code = FORMAT == GCK_INT8 ? gck_code(FORMAT, 0, y[j], inv, noise)
                                                     : gck_level_code_noisy(FORMAT, (int)uniform, y[j], inv, noise);
            codes[j / 4] |= code << (8 * (j % 4));
        });
    }
#pragma unroll
    for (int w = 0; w < 4; w++) {
        codes[w] = FORMAT == GCK_INT8 || NOISY ? codes[w] : level_codes<FORMAT>(codes[w], uniform);
    }
    pack_codes<FORMAT>(codes, amax != 0, s);
    s.side = stored | uniform;

    /* A value beyond the limit makes amax(y) larger than half of it: |y| = sqrt(128) |x|.  NaN
     * and infinity reach some y, and their bits are larger than any. */
    const bool many = large >= GCK_MOST_LARGE, tiny = amax > 0 && gck_float(amax) < GCK_TINY;
    return many || tiny || amax > gck_limit(x.dtype()) - 0x00800000u ? amax | (many ? MOST_ARE_LARGE : 0u) : 0u;
}

/* ---- decoding ---- */

GCK_LANE_FN uint32_t lanes_or(uint32_t bits)
{
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
        bits |= __shfl_xor_sync(ALL_LANES, bits, lanes);
    }
    return bits;
}

/* The 56 stolen bits, in every lane of the group. */
GCK_LANE_FN uint64_t gather_outlier(const uint32_t (&codes)[4], int lane)
{
    uint32_t bits = 0;

#pragma unroll
    for (int w = 0; w < 4; w++) {
        bits |= ((codes[w] & four(1)) * 0x01020408u >> 24 & 0xFu) << (4 * w);
    }
    bits &= stolen_of_lane(lane);
    const uint32_t mine = bits << (16 * (lane % 2));
    return lanes_or(lane < 2 ? mine : 0u) | (uint64_t)lanes_or(lane < 2 ? 0u : mine) << 32;
}

template <gck_format FORMAT>
GCK_LANE_FN void decode_rotated(const share<FORMAT> &s, int64_t g, float (&v)[VALUES])
{
    const uint32_t stored = FORMAT == GCK_INT6 ? s.side & ~1u : s.side;
    uint32_t bytes[4];
    int32_t pair[PAIRS], y[VALUES];

    unpack_codes<FORMAT>(s, bytes);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        bytes[w] = FORMAT == GCK_INT8 ? bytes[w] : int6_levels(bytes[w], s.side & 1u);
    }
    pairs_of_bytes(bytes, pair);
    rotate_pairs(pair, y);
    y[0] += FORMAT == GCK_INT6 ? sum_of_halves((int)threadIdx.x % LANES) : 0;
    unrotated_values(y, gck_float(stored << 16) * 0x1p-32f, g, v);
}

/* gck_decode_outlier(): the values of the codes, doubled, |them| <= 255. */
template <gck_format FORMAT>
GCK_LANE_FN answer decode_outlier(const share<FORMAT> &s, int64_t g, float (&v)[VALUES])
{
    const int lane = (int)threadIdx.x % LANES;
    uint32_t codes[4];
    int32_t pair[PAIRS], y[VALUES];

    unpack_codes<FORMAT>(s, codes);
    const uint64_t outlier = gather_outlier(codes, lane);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int i = lane * VALUES + j, shift = 8 * (j % 4);
        const uint8_t lower = (uint8_t)(codes[j / 4] >> shift), upper = (uint8_t)(codes[2 + j / 4] >> shift);
        pair[j] = paired(gck_outlier_value(FORMAT, lower, i), gck_outlier_value(FORMAT, upper, i + PAIRS));
    }
    rotate_pairs(pair, y);
    unrotated_values(y, gck_float((uint32_t)(outlier >> 8 & 0x7FFFu) << 16) * 0x1p-33f, g, v);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = lane * VALUES + j == (int)(outlier & 127u) ? gck_float((uint32_t)(outlier >> 24)) : v[j];
    }
    return is_ordinary<FORMAT>(s.side) ? RIGHT : s.side == GCK_ESC_OUTLIER ? BETTER : ODD;
}

#endif
