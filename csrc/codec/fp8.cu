/* fp8.cu: device kernels of fp8_e4m3 and fp8_e5m2.  The format is group.h's. */
#include "kernel.cuh"

/* Every group without an escape is done here: the scaling by 2^k costs one multiplication
 * a value and serves the very small and the very large. */
template <gck_format FORMAT>
GCK_LANE_FN bool lane_encode(float (&v)[VALUES], uint32_t limit, uint32_t (&codes)[4], uint32_t *scale)
{
    const uint32_t bits = group_max(lane_amax(v));
    const float amax = gck_float(bits);
    const int k = gck_prescale(FORMAT, amax);
    const float by = gck_pow2(k);
    const uint32_t stored = gck_stored(FORMAT, 0, amax * by);
    const float m = gck_multiplier(FORMAT, 0, stored);
    const uint32_t keep = bits == 0 ? 0u : 0xFFFFFFFFu;      /* -0 in a zero group has code 0 */

#pragma unroll
    for (int w = 0; w < 4; w++) {
        uint32_t four = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) {
            four |= (uint32_t)gck_code(FORMAT, v[4 * w + b] * by, m) << (8 * b);
        }
        codes[w] = four & keep;
    }
    *scale = (stored - (uint32_t)(k * 128)) & keep;
    return bits <= limit;
}

template <gck_format FORMAT>
GCK_LANE_FN void lane_decode(const uint32_t (&codes)[4], uint32_t scale, float (&v)[VALUES])
{
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = gck_times_step(FORMAT, gck_code_value(FORMAT, (uint8_t)(codes[j / 4] >> (8 * (j % 4)))), scale);
    }
}

extern "C" {

int gck_fp8_e4m3_encode_cuda(const gck_tensor *x, void *const *payloads, const gck_how *how, int n)
{
    (void)how;
    return run_groups<GCK_E4M3>(true, x, (const void *const *)payloads, n);
}

int gck_fp8_e4m3_decode_cuda(const void *const *payloads, const gck_tensor *x, int n)
{
    return run_groups<GCK_E4M3>(false, x, payloads, n);
}

int gck_fp8_e5m2_encode_cuda(const gck_tensor *x, void *const *payloads, const gck_how *how, int n)
{
    (void)how;
    return run_groups<GCK_E5M2>(true, x, (const void *const *)payloads, n);
}

int gck_fp8_e5m2_decode_cuda(const void *const *payloads, const gck_tensor *x, int n)
{
    return run_groups<GCK_E5M2>(false, x, payloads, n);
}

}
