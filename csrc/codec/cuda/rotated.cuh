/* rotated.cuh: the usual path of int8 and int6, and how a group is found for which it may be wrong. */
#ifndef GRADCKPT_ROTATED_CUH
#define GRADCKPT_ROTATED_CUH

#include "codec/cuda/unusual.cuh"

/* ---- doubt ---- */

/* Of a group's values: the larger of max x and -min x, and the smaller.  counts, of this lane: signs, where
 * gck_is_doubtful() counts them, and in the next byte values with 4 |x| >= larger. */
struct sizes {
    float    larger, smaller;
    uint32_t counts;
};

GCK_LANE_FN sizes sizes_of(const looks &seen, const float (&x)[VALUES])
{
    const uint32_t up = group_max(gck_bits(fabsf(seen.high))), down = group_max(gck_bits(fabsf(seen.low)));
    const float larger = gck_float(up > down ? up : down), quarter = 0.25f * larger;
    float far = 0.f;

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        far += fabsf(x[j]) >= quarter ? 1.f : 0.f;
    }
    const uint32_t negative = threadIdx.x % LANES * VALUES < GCK_SIGNS ? seen.negative : 0u;
    return {larger, gck_float(up > down ? down : up), negative | (uint32_t)far << 8};
}

/* What encode_unusual() gets: 0 for a group that is ordinary beyond doubt, else amax(y), at least 1, and in bit
 * 31 whether int4 has lost it.  counts: of the whole group. */
template <gck_format FORMAT>
GCK_LANE_FN uint32_t doubt_of(const sizes &x, uint32_t counts, uint32_t amax, bool lost, gck_dtype dtype)
{
    const float size = gck_float(amax), of_tiny = FORMAT == GCK_INT4 ? x.larger : size;
    const int negative = (int)(counts & 0xFFu), far = (int)(counts >> 8 & 0xFFu);
    const bool doubtful = negative < GCK_FEW_NEGATIVE || negative > GCK_MANY_NEGATIVE || 4.f * x.smaller < x.larger
        || !(size <= GCK_FLAT * x.larger)              /* NaN, too */
        || (size < GCK_PEAKED * x.larger && far <= GCK_MOST_OUTLIERS);

    return gck_bits(x.larger) > gck_limit(dtype) || (of_tiny > 0.f && of_tiny < GCK_TINY)
            || (amax != 0 && (doubtful || lost))
        ? (amax != 0 ? amax : 1u) | (lost ? LOST : 0u) : 0u;
}

/* ---- encoding ---- */

/* How many of a lane's 16 y are large: integers that differ in their upper two bits. */
template <bool NOISY>
GCK_LANE_FN uint32_t count_large(const float (&y)[VALUES], float inv, const uint32_t (&t)[4])
{
    uint32_t large = 0;

    if constexpr (NOISY) {
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            const float p = y[j] * inv;
            large += p >= 63.5f || p < -64.5f;
        }
        return large;
    } else {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            large |= ((t[w] ^ t[w] << 1) & four(0x80)) >> w;
        }
        return (uint32_t)__popc(large);
    }
}

template <gck_format FORMAT, bool NOISY, typename VIEW>
GCK_LANE_FN uint32_t encode_rotated(const VIEW &x, int64_t i, const gck_dither &dither, share<FORMAT> &s)
{
    float y[VALUES];
    uint32_t codes[4] = {};

    const looks seen = load_and_look(x, i, y);
    sizes size = sizes_of(seen, y);
    rotate(y, i / GCK_GROUP);
    const uint32_t amax = group_max(lane_amax(y));
    const uint32_t stored = gck_stored(FORMAT, 0, NOISY, gck_float(amax));
    const float inv = amax == 0 ? 0.f : gck_inverse(FORMAT, 0, stored);

    if constexpr (!NOISY) {
        integers(y, inv, codes);
    }
    if constexpr (FORMAT == GCK_INT6) {
        size.counts |= count_large<NOISY>(y, inv, codes) << 16;
    }
    const uint32_t counts = (uint32_t)group_sum((int)size.counts);
    const uint32_t uniform = FORMAT == GCK_INT6 && counts >> 16 > GCK_MANY_LARGE;
    to_codes<FORMAT, NOISY>(y, inv, uniform, dither, i, codes);
    pack_codes<FORMAT>(codes, amax != 0, s);
    s.side = stored | uniform;
    return doubt_of<FORMAT>(size, counts, amax, false, x.dtype());
}

/* ---- decoding ---- */

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

#endif
