/* int8_plain_avx2.c: int8_plain for AVX2. */
#if defined(__x86_64__)

#include "codec/x86/integer_avx2.h"
#include "codec/x86/noise_avx2.h"

/* ---- encode ---- */

INLINE __m256i noisy_of(v16 v, __m256 inverse, __m256i noise)
{
    return rounded_noisy((v16){_mm256_mul_ps(v.even, inverse), _mm256_mul_ps(v.odd, inverse)}, noise);
}

/* noise: NULL rounds to nearest. */
INLINE void encode_group(gck_dtype dtype, const char *group, float multiplier, const __m256i *noise, uint8_t *out,
                         load_constants c, __m256 rounder, int stream)
{
    const __m256i no_flip = _mm256_setzero_si256();
    const __m256 inverse = _mm256_set1_ps(multiplier);

    for (int k = 0; k < 8; k += 2) {
        const v16 a = load16(group, dtype, k, no_flip, c), b = load16(group, dtype, k + 1, no_flip, c);
        const __m256i packed = noise
            ? noisy_bytes(noisy_of(a, inverse, noise[k]), noisy_of(b, inverse, noise[k + 1]))
            : _mm256_packs_epi16(quantised(a, inverse, rounder), quantised(b, inverse, rounder));
        store(out + 16 * k, _mm256_permute4x64_epi64(packed, 0xD8), stream);
    }
}

/* The loop of fp8_avx2.c, once more: what it does with an ordinary group shares its registers. */
INLINE void encode(gck_dtype dtype, const void *x, int64_t ngroups, uint8_t *codes, uint16_t *scales,
                   const gck_dither *dither, int64_t index, int stream)
{
    const size_t stride = group_nbytes(dtype);
    const load_constants c = constants_of(dtype);
    const __m256 rounder = kept_ps(ROUNDER);
    const int noisy = dither != NULL;
    const philox p = philox_of(dither);
    __m256i noise[8];
    batch_steps next = steps_of_groups(GCK_INT8_PLAIN, dtype, noisy, x, ngroups, gck_limit(dtype), c);

    for (int64_t first = 0, after; first < ngroups; first = after) {
        const int n = ngroups - first < BATCH ? (int)(ngroups - first) : BATCH;
        const char *group = (const char *)x + (size_t)first * stride;
        const batch_steps s = next;

        /* One batch ahead, so that no instruction waits for the division. */
        after = batch_after(first, ngroups, dtype, stream);
        if (after < ngroups) {
            next = steps_of_groups(GCK_INT8_PLAIN, dtype, noisy, (const char *)x + (size_t)after * stride,
                                   ngroups - after, gck_limit(dtype), c);
        }
        for (int j = 0; j < n; j++, group += stride) {
            uint8_t *out = codes + (first + j) * GCK_GROUP;
            prefetch(group, stride, ahead_of(stride, stream));
            if (s.odd >> j & 1) {
                encode_odd(GCK_INT8_PLAIN, dtype, group, index + first + j, dither, out, scales + first + j);
                continue;
            }
            scales[first + j] = s.stored[j];
            if (noisy) {
                noise_of_group(&p, index + first + j, noise);
            }
            encode_group(dtype, group, s.multiplier[j], noisy ? noise : NULL, out, c, rounder, stream);
        }
    }
}

/* ---- decode ---- */

/* code + 128 + 2^15, of the codes that `bytes` moves to bits 8..15 of the lanes.  With
 * 9 bits, 2^15 + 128 times a step is exact, and so is the fused difference. */
INLINE __m256 biased(__m256i codes, __m256i bytes, __m256i exponent)
{
    return _mm256_castsi256_ps(_mm256_xor_si256(_mm256_shuffle_epi8(codes, bytes), exponent));
}

INLINE void decode(gck_dtype dtype, const uint8_t *codes, const uint16_t *scales, int64_t ngroups, void *x,
                   int stream)
{
    const size_t stride = group_nbytes(dtype);
    const store_constants c = store_constants_of();
    const __m256i exponent = kept(0x47008000u);
    const __m256 bias = kept_ps(0x1p15f + 128.f);
    const __m256i even_bytes = _mm256_setr_epi8(-1, 0, -1, -1, -1, 2, -1, -1, -1, 4, -1, -1, -1, 6, -1, -1,
                                                -1, 8, -1, -1, -1, 10, -1, -1, -1, 12, -1, -1, -1, 14, -1, -1);
    const __m256i odd_bytes = _mm256_setr_epi8(-1, 1, -1, -1, -1, 3, -1, -1, -1, 5, -1, -1, -1, 7, -1, -1,
                                               -1, 9, -1, -1, -1, 11, -1, -1, -1, 13, -1, -1, -1, 15, -1, -1);
    char *group = x;

    for (int64_t g = 0; g < ngroups; g++, codes += GCK_GROUP, group += stride) {
        if (!step_is_ordinary(scales[g]) && !is_zero_group(GCK_INT8_PLAIN, codes, scales[g])) {
            decode_odd(GCK_INT8_PLAIN, dtype, codes, scales + g, 0, group);
            continue;
        }
        const __m256 step = step_of(scales[g]);
        const __m256 zero = _mm256_mul_ps(step, bias);
        for (int k = 0; k < 8; k++) {
            const __m256i w = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes + k));
            const __m256 even = biased(w, even_bytes, exponent), odd = biased(w, odd_bytes, exponent);
            store16(group, dtype, k, (v16){_mm256_fmsub_ps(even, step, zero), _mm256_fmsub_ps(odd, step, zero)},
                    _mm256_setzero_si256(), c, stream);
        }
    }
}

/* ---- kernels ---- */

#define KERNELS(dtype)                                                                                  \
    void gck_avx2_encode_GCK_INT8_PLAIN_##dtype(const void *x, int64_t ngroups, uint8_t *codes,         \
                                                uint16_t *scales, int64_t index, int streaming)         \
    {                                                                                                   \
        STREAMED(encode, codes, dtype, x, ngroups, codes, scales, NULL, index)                          \
    }                                                                                                   \
    void gck_avx2_encode_noisy_GCK_INT8_PLAIN_##dtype(const void *x, int64_t ngroups, uint8_t *codes,   \
                                                      uint16_t *scales, const gck_dither *dither,       \
                                                      int64_t index)                                    \
    {                                                                                                   \
        encode(dtype, x, ngroups, codes, scales, dither, index, 0);                                     \
    }                                                                                                   \
    void gck_avx2_decode_GCK_INT8_PLAIN_##dtype(const uint8_t *codes, const uint16_t *scales,           \
                                                int64_t ngroups, void *x, int64_t index, int streaming) \
    {                                                                                                   \
        (void)index;                                                                                    \
        STREAMED(decode, x, dtype, codes, scales, ngroups, x)                                           \
    }
KERNELS(GCK_F32)
KERNELS(GCK_F16)
KERNELS(GCK_BF16)

#else
typedef int gck_int8_plain_avx2_is_empty;       /* ISO C requires a declaration in every file */
#endif
