/* int8.cu: device kernels of int8 (rotated) and int8_plain.  The format is group.h's. */
#include "kernel.cuh"

/* The signs of this lane's 16 values, bit j for value j. */
GCK_LANE_FN uint32_t lane_signs(void)
{
    const int lane = (int)threadIdx.x % LANES;

    return gck_sign_word(lane / 2) >> (16 * (lane % 2));
}

GCK_LANE_FN float negate_if(uint32_t signs, int j, float v)
{
    return gck_float(gck_bits(v) ^ (signs << (31 - j) & 0x80000000u));
}

/* y = H (d o x) in place, stages in the order of the index bits, as gck_hadamard(). */
GCK_LANE_FN void rotate(float (&y)[VALUES])
{
    const uint32_t signs = lane_signs();

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

/* The same transform of codes.  Sums are integers below 2^15, so any order will do, and
 * two travel in one word as lower + upper * 2^16: half the additions, half the shuffles.
 * Pairs are values j and j + 8; their own stage comes last. */
GCK_LANE_FN void rotate_codes(const uint32_t (&codes)[4], int32_t (&y)[VALUES])
{
    int32_t pair[8];

#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int32_t lower = (int8_t)(codes[j / 4] >> (8 * (j % 4)));
        const int32_t upper = (int8_t)(codes[2 + j / 4] >> (8 * (j % 4)));
        pair[j] = lower + upper * 65536;
    }
#pragma unroll
    for (int h = 1; h < 8; h *= 2) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
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
        for (int j = 0; j < 8; j++) {
            pair[j] = pair[j] * sign + __shfl_xor_sync(ALL_LANES, pair[j], lanes);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int32_t lower = (int16_t)pair[j], upper = (pair[j] - lower) >> 16;
        y[j] = lower + upper;
        y[j + 8] = lower - upper;
    }
}

template <gck_format FORMAT>
GCK_LANE_FN bool lane_encode(float (&v)[VALUES], uint32_t limit, uint32_t (&codes)[4], uint32_t *scale)
{
    const bool escapes = group_any(lane_amax(v) > limit);

    if (FORMAT == GCK_INT8) {
        rotate(v);
    }
    const uint32_t bits = group_max(lane_amax(v));
    const float amax = gck_float(bits);
    const uint32_t stored = gck_stored(FORMAT, 0, amax);
    const float inv = bits == 0 ? 0.f : gck_inverse(FORMAT, 0, stored);

#pragma unroll
    for (int w = 0; w < 4; w++) {
        uint32_t four = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) {
            four |= ((uint32_t)gck_round_product(v[4 * w + b], inv) & 0xFFu) << (8 * b);
        }
        codes[w] = four;
    }
    *scale = stored;
    return !escapes && (bits == 0 || amax >= GCK_TINY);
}

template <gck_format FORMAT>
GCK_LANE_FN void lane_decode(const uint32_t (&codes)[4], uint32_t scale, float (&v)[VALUES])
{
    if (FORMAT == GCK_INT8) {
        const uint32_t signs = lane_signs();
        const float step = gck_float(scale << 16) * 0x1p-32f;
        int32_t y[VALUES];

        rotate_codes(codes, y);
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            v[j] = negate_if(signs, j, (float)y[j] * step);
        }
    } else {
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            v[j] = gck_times_step(FORMAT, (float)(int8_t)(codes[j / 4] >> (8 * (j % 4))), scale);
        }
    }
}

extern "C" {

int gck_int8_encode_cuda(const gck_tensor *x, void *const *payloads, const gck_how *how, int n)
{
    (void)how;
    return run_groups<GCK_INT8>(true, x, (const void *const *)payloads, n);
}

int gck_int8_decode_cuda(const void *const *payloads, const gck_tensor *x, int n)
{
    return run_groups<GCK_INT8>(false, x, payloads, n);
}

int gck_int8_plain_encode_cuda(const gck_tensor *x, void *const *payloads, const gck_how *how, int n)
{
    (void)how;
    return run_groups<GCK_INT8_PLAIN>(true, x, (const void *const *)payloads, n);
}

int gck_int8_plain_decode_cuda(const void *const *payloads, const gck_tensor *x, int n)
{
    return run_groups<GCK_INT8_PLAIN>(false, x, payloads, n);
}

}
