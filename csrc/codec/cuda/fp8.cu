/* fp8.cu: device kernels of fp8_e4m3 and fp8_e5m2. */
#include "codec/cuda/unusual.cuh"

/* 2^120 for E4M3, 2^112 for E5M2: from gck_fp8_code()'s scaled values back to FP8's own. */
template <gck_format FORMAT>
GCK_LANE_FN float unshift(void) { return FORMAT == GCK_E4M3 ? 0x1p120f : 0x1p112f; }

/* The codes of four values times m.
 *
 * Hardware gives the bytes of gck_fp8_code(): both round p = f32(v * m) to the same grid,
 * to nearest even.  There, p lies so low that FP8's subnormals are float32's; here it is
 * moved up by a power of two first, which is exact (p is at most a little above the
 * largest FP8 value, and float32 has the room).  p is no NaN (escapes are odd groups), and
 * at most 448 (1 + 2^-8) < 464, where 480 would begin (57344 (1 + 2^-8) < 61440): nothing
 * saturates. */
template <gck_format FORMAT>
GCK_LANE_FN uint32_t four_codes(float a, float b, float c, float d, float m)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const float up = unshift<FORMAT>();

    a = a * m * up, b = b * m * up, c = c * m * up, d = d * m * up;
    return FORMAT == GCK_E4M3 ? ptx_e4m3x2(a, b) | (uint32_t)ptx_e4m3x2(c, d) << 16
                              : ptx_e5m2x2(a, b) | (uint32_t)ptx_e5m2x2(c, d) << 16;
#else
    return (uint32_t)gck_fp8_code(FORMAT, 0, a, m, GCK_NEAREST)
         | (uint32_t)gck_fp8_code(FORMAT, 0, b, m, GCK_NEAREST) << 8
         | (uint32_t)gck_fp8_code(FORMAT, 0, c, m, GCK_NEAREST) << 16
         | (uint32_t)gck_fp8_code(FORMAT, 0, d, m, GCK_NEAREST) << 24;
#endif
}

/* Every group without an escape is done here: the scaling by 2^k costs one multiplication
 * a value and serves the very small and the very large. */
template <gck_format FORMAT, bool NOISY, typename VIEW>
GCK_LANE_FN uint32_t lane_encode(const VIEW &x, int64_t i, const gck_dither &dither, share<FORMAT> &s)
{
    float v[VALUES];

    load_values(x, i, v);
    const uint32_t bits = group_max(lane_amax(v));
    const float amax = gck_float(bits);
    const int k = gck_prescale(FORMAT, amax);
    const float by = gck_pow2(k);
    const uint32_t stored = gck_stored(FORMAT, 0, NOISY, amax * by);
    const float m = gck_multiplier(FORMAT, 0, stored);
    const uint32_t keep = bits == 0 ? 0u : 0xFFFFFFFFu;      /* -0 in a zero group has code 0 */

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] *= by;
    }
    if constexpr (NOISY) {
        s.word[0] = s.word[1] = s.word[2] = s.word[3] = 0;
        for_each_noise<NOISY>(dither, i, [&](int j, int noise) {
            s.word[j / 4] |= (uint32_t)gck_fp8_code(FORMAT, 0, v[j], m, noise) << (8 * (j % 4));
        });
    } else {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            s.word[w] = four_codes<FORMAT>(v[4 * w], v[4 * w + 1], v[4 * w + 2], v[4 * w + 3], m);
        }
    }
#pragma unroll
    for (int w = 0; w < 4; w++) {
        s.word[w] &= keep;
    }
    s.side = (stored - (uint32_t)(k * 128)) & keep;
    return bits > gck_limit(x.dtype());
}

/* The values of the codes in bits 8 j and 8 j + 8 of a word, j even: exact. */
template <gck_format FORMAT>
GCK_LANE_FN void two_values(uint32_t word, int upper, float *a, float *b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const uint32_t two = upper ? word >> 16 : word;
    const uint32_t halves = FORMAT == GCK_E4M3 ? ptx_f16x2_e4m3x2(two) : ptx_f16x2_e5m2x2(two);

    *a = half_value<GCK_F16>(halves, 0);
    *b = half_value<GCK_F16>(halves, 1);
#else
    *a = gck_fp8_value(FORMAT, (uint8_t)(word >> (16 * upper)));
    *b = gck_fp8_value(FORMAT, (uint8_t)(word >> (16 * upper + 8)));
#endif
}

template <gck_format FORMAT>
GCK_LANE_FN void lane_decode(const share<FORMAT> &s, int64_t, float (&v)[VALUES])
{
#pragma unroll
    for (int j = 0; j < VALUES; j += 2) {
        two_values<FORMAT>(s.word[j / 4], j / 2 % 2, &v[j], &v[j + 1]);
        v[j] = gck_times_step(FORMAT, v[j], s.side & 0x7FFFu);
        v[j + 1] = gck_times_step(FORMAT, v[j + 1], s.side & 0x7FFFu);
    }
}

GCK_GROUP_CODEC_CUDA(fp8_e4m3, GCK_E4M3)
GCK_GROUP_CODEC_CUDA(fp8_e5m2, GCK_E5M2)
