/* int4.cu: device kernels of int4. */
#include "codec/cuda/rotated.cuh"

/* The noise of value `at` of a group whose first value is `first`. */
GCK_LANE_FN int noise_of_value(const gck_dither &dither, int64_t first, int at)
{
    uint32_t word[4];

    gck_philox(&dither, (uint64_t)(first + at) / GCK_PHILOX_VALUES, word);
    const uint32_t two = at & 4 ? (at & 2 ? word[3] : word[2]) : at & 2 ? word[1] : word[0];
    return (int)(two >> (16 * (at & 1)) & 0xFFFFu);
}

template <gck_format FORMAT, bool NOISY, typename VIEW>
GCK_LANE_FN uint32_t lane_encode(const VIEW &x, int64_t i, const gck_dither &dither, share<FORMAT> &s)
{
    const int64_t first = i - (int)threadIdx.x % LANES * VALUES;
    uint32_t codes[4] = {};
    float y[VALUES], taken;

    const looks seen = load_and_look(x, i, y);
    const sizes size = sizes_of(seen, y);
    const uint32_t largest = gck_bits(size.larger);
    const int at = take_largest(y, largest, &taken);
    const uint32_t outlier = gck_int4_outlier(taken, NOISY ? noise_of_value(dither, first, at) : GCK_NEAREST);
    s.side = largest == 0 ? 0u : (uint32_t)at << 9 | outlier << 16;

    rotate(y, i / GCK_GROUP);
    const uint32_t amax = group_max(lane_amax(y));
    const uint32_t low = gck_int4_low(s.side >> 16) << 3;
    const uint32_t wanted = gck_stored(FORMAT, 0, NOISY, gck_float(amax));
    const uint32_t stored = wanted < low ? low : wanted;
    const float inv = amax == 0 ? 0.f : gck_inverse(FORMAT, 0, stored);
    const bool kept = amax != 0 && (wanted >= low || gck_float(amax) * inv >= GCK_INT4_LOST);
    if constexpr (!NOISY) {
        integers(y, inv, codes);
    }
    to_codes<FORMAT, NOISY>(y, inv, 0, dither, i, codes);
    pack_codes<FORMAT>(codes, kept, s);
    s.side |= kept ? ((stored - low) >> 3) + 1u : 0u;
    return doubt_of<FORMAT>(size, (uint32_t)group_sum((int)size.counts), amax, amax != 0 && wanted < low, x.dtype());
}

template <gck_format FORMAT>
GCK_LANE_FN void lane_decode(const share<FORMAT> &s, int64_t g, float (&v)[VALUES])
{
    const int lane = (int)threadIdx.x % LANES, at = (int)(s.side >> 9 & 127u);
    const uint32_t stored = gck_int4_stored(s.side & 511u, s.side >> 16);
    uint32_t bytes[4];
    int32_t pair[PAIRS], y[VALUES];

    int4_levels(s.word[0], bytes[0], bytes[1]);
    int4_levels(s.word[1], bytes[2], bytes[3]);
    pairs_of_bytes(bytes, pair);
    rotate_pairs(pair, y);
    y[0] += sum_of_halves(lane);
    unrotated_values(y, gck_float(stored << 16) * 0x1p-32f, g, v);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = lane * VALUES + j == at ? gck_float(s.side >> 16 << 16) : v[j];
    }
}

GCK_GROUP_CODEC_CUDA(int4, GCK_INT4)
