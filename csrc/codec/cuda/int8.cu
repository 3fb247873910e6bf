/* int8.cu: device kernels of int8 (rotated) and int8_plain. */
#include "codec/cuda/rotated.cuh"

template <gck_format FORMAT, bool NOISY, typename VIEW>
GCK_LANE_FN uint32_t lane_encode(const VIEW &x, int64_t i, const gck_dither &dither, share<FORMAT> &s)
{
    if constexpr (FORMAT == GCK_INT8) {
        return encode_rotated<FORMAT, NOISY>(x, i, dither, s);
    } else {
        float v[VALUES];
        load_values(x, i, v);
        const uint32_t amax = group_max(lane_amax(v));
        const uint32_t stored = gck_stored(FORMAT, 0, NOISY, gck_float(amax));
        const float inv = amax == 0 ? 0.f : gck_inverse(FORMAT, 0, stored);

        if constexpr (NOISY) {
            s.word[0] = s.word[1] = s.word[2] = s.word[3] = 0;
            for_each_noise<NOISY>(dither, i, [&](int j, int noise) {
                s.word[j / 4] |= (uint32_t)gck_code(FORMAT, 0, v[j], inv, noise) << (8 * (j % 4));
            });
        } else {
            integers(v, inv, s.word);
        }
        s.side = stored;
        return amax > gck_limit(x.dtype()) || (amax > 0 && gck_float(amax) < GCK_TINY);
    }
}

template <gck_format FORMAT>
GCK_LANE_FN void lane_decode(const share<FORMAT> &s, int64_t g, float (&v)[VALUES])
{
    if constexpr (FORMAT == GCK_INT8) {
        decode_rotated<FORMAT>(s, g, v);
    } else {
        (void)g;
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            v[j] = gck_times_step(FORMAT, (float)(int8_t)(s.word[j / 4] >> (8 * (j % 4))), s.side & 0x7FFFu);
        }
    }
}

GCK_GROUP_CODEC_CUDA(int8, GCK_INT8)
GCK_GROUP_CODEC_CUDA(int8_plain, GCK_INT8_PLAIN)
