/* int8_avx2.c: int8 and int8_plain for AVX2. */
#if defined(__x86_64__)

#include "avx2.h"

/* The Hadamard signs as the sign bits of 128 16-bit values, for each pattern. */
#define SIGN(word, bit) (((word) >> (bit) & 1u) << 15)
#define SIGNS_4(word, bit) SIGN(word, bit), SIGN(word, bit + 1), SIGN(word, bit + 2), SIGN(word, bit + 3)
#define SIGNS_16(word, bit) SIGNS_4(word, bit), SIGNS_4(word, bit + 4), SIGNS_4(word, bit + 8), SIGNS_4(word, bit + 12)
#define SIGNS_32(word) SIGNS_16(word, 0), SIGNS_16(word, 16)
#define SIGNS_128(a, b, c, d) {SIGNS_32(a), SIGNS_32(b), SIGNS_32(c), SIGNS_32(d)},
static const _Alignas(32) uint16_t signs[GCK_NPATTERNS][GCK_GROUP] = {GCK_SIGN_PATTERNS(SIGNS_128)};

/* Of group `index`. */
INLINE const __m256i *signs_of(int64_t index) { return (const __m256i *)signs[gck_pattern(index)]; }

/* ---- encode ---- */

/* 16 codes in 16-bit lanes.  The fused sum rounds the exact product, as
 * gck_round_product() does. */
INLINE __m256i quantised(v16 v, __m256 inverse, __m256 rounder)
{
    const __m256i even = _mm256_castps_si256(_mm256_fmadd_ps(v.even, inverse, rounder));
    const __m256i odd = _mm256_castps_si256(_mm256_fmadd_ps(v.odd, inverse, rounder));
    return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
}

/* 32 codes, in order, of two times 16 in 16-bit lanes. */
INLINE __m256i codes_of(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8); }

INLINE void encode_plain(gck_dtype dtype, const void *x, int64_t ngroups, uint8_t *codes, uint16_t *scales,
                         int64_t index, int stream)
{
    const size_t stride = group_nbytes(dtype);
    const __m256i no_flip = _mm256_setzero_si256();
    const load_constants c = constants_of(dtype);
    const __m256 rounder = kept_ps(ROUNDER);
    const char *group = x;
    batch_steps next = steps_of_groups(GCK_INT8_PLAIN, dtype, group, ngroups, gck_limit(dtype), c);

    for (int64_t first = 0; first < ngroups; first += BATCH) {
        const int n = ngroups - first < BATCH ? (int)(ngroups - first) : BATCH;
        const batch_steps s = next;

        /* One batch ahead, so that nobody waits for the division. */
        if (n == BATCH) {
            next = steps_of_groups(GCK_INT8_PLAIN, dtype, group + BATCH * stride, ngroups - first - BATCH,
                                   gck_limit(dtype), c);
        }
        for (int j = 0; j < n; j++, group += stride) {
            uint8_t *out = codes + (first + j) * GCK_GROUP;
            prefetch(group, stride);
            if (s.odd >> j & 1) {
                scales[first + j] = encode_odd(GCK_INT8_PLAIN, dtype, group, index + first + j, out);
                continue;
            }
            const __m256 inverse = _mm256_set1_ps(s.multiplier[j]);
            scales[first + j] = s.stored[j];
            for (int k = 0; k < 8; k += 2) {
                store(out + 16 * k, codes_of(quantised(load16(group, dtype, k, no_flip, c), inverse, rounder),
                                             quantised(load16(group, dtype, k + 1, no_flip, c), inverse, rounder)),
                      stream);
            }
        }
    }
}

/* A stage of gck_hadamard() between registers `h` apart. */
INLINE void stage(__m256 y[8], int h)
{
    for (int i = 0; i < 8; i++) {
        if (!(i & h)) {
            const __m256 a = y[i], b = y[i + h];
            y[i] = _mm256_add_ps(a, b);
            y[i + h] = _mm256_sub_ps(a, b);
        }
    }
}

/* The stages of index bits 1, 2, 3: between lanes.  A product with +-1 is exact. */
INLINE __m256 stages_of_lanes(__m256 y)
{
    y = _mm256_fmadd_ps(y, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(y, 0xB1));
    y = _mm256_fmadd_ps(y, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(y, 0x4E));
    return _mm256_fmadd_ps(y, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(y, y, 0x01));
}

/* The first four stages of y = H (d o x): y has the even values first. */
INLINE void rotate_in_lanes(const char *group, gck_dtype dtype, const __m256i *signs, __m256 y[16], load_constants c)
{
    for (int k = 0; k < 8; k++) {
        const v16 v = load16(group, dtype, k, _mm256_load_si256(signs + k), c);
        y[k] = stages_of_lanes(_mm256_add_ps(v.even, v.odd));
        y[k + 8] = stages_of_lanes(_mm256_sub_ps(v.even, v.odd));
    }
}

/* The last three; returns 8 maxima of the bits without the sign. */
INLINE __m256i rotate_between(__m256 *y, __m256i abs)
{
    __m256i max = _mm256_setzero_si256();

    for (int half = 0; half < 16; half += 8) {
        __m256 r[8];
        for (int k = 0; k < 8; k++) {
            r[k] = y[half + k];
        }
        stage(r, 1);
        stage(r, 2);
        stage(r, 4);
        for (int k = 0; k < 8; k++) {
            y[half + k] = r[k];
            max = _mm256_max_epi32(max, _mm256_and_si256(_mm256_castps_si256(r[k]), abs));
        }
    }
    return max;
}

/* How many of 32 codes have different upper two bits. */
INLINE int count_large(__m256i t)
{
    return __builtin_popcount((uint32_t)_mm256_movemask_epi8(_mm256_xor_si256(t, _mm256_add_epi8(t, t))));
}

/* All ones where a value of the group escapes, which the sums of float16 do not tell. */
INLINE __m256i f16_escapes(const char *group, load_constants c)
{
    return _mm256_srli_epi32(_mm256_cmpgt_epi32(group_maxima(group, GCK_F16, c), _mm256_set1_epi32(0x7BFE0000)), 1);
}

INLINE void encode_rotated(gck_dtype dtype, const void *x, int64_t ngroups, uint8_t *codes, uint16_t *scales,
                           int64_t index, int stream)
{
    /* max |y| >= max |x| but for rounding: below half the limit, nothing escapes. */
    const uint32_t top = dtype == GCK_F16 ? 0x7F7FFFFFu : gck_limit(dtype) - 0x00800000u;
    const size_t stride = group_nbytes(dtype);
    const load_constants c = constants_of(dtype);
    const __m256 rounder = kept_ps(ROUNDER);
    const __m256i abs = kept(0x7FFFFFFFu);
    __m256i maxima[BATCH] = {0};
    __m256 y[BATCH][16];

    for (int64_t first = 0; first < ngroups; first += BATCH) {
        const int n = ngroups - first < BATCH ? (int)(ngroups - first) : BATCH;
        const char *group = (const char *)x + (size_t)first * stride;

        for (int j = 0; j < n; j++) {
            rotate_in_lanes(group + (size_t)j * stride, dtype, signs_of(index + first + j), y[j], c);
        }
        for (int j = 0; j < n; j++) {
            maxima[j] = rotate_between(y[j], abs);
            if (dtype == GCK_F16) {
                maxima[j] = _mm256_or_si256(maxima[j], f16_escapes(group + (size_t)j * stride, c));
            }
        }
        const batch_steps s = steps_of_batch(GCK_INT8, maxima_of_batch(maxima), top);
        for (int j = 0; j < n; j++, group += stride) {
            uint8_t *out = codes + (first + j) * GCK_GROUP;
            if (s.odd >> j & 1) {
                scales[first + j] = encode_odd(GCK_INT8, dtype, group, index + first + j, out);
                continue;
            }
            const __m256 inverse = _mm256_set1_ps(s.multiplier[j]);
            int large = 0;
            prefetch(group, stride);
            scales[first + j] = s.stored[j];
            for (int k = 0; k < 8; k += 2) {
                const __m256i t = codes_of(quantised((v16){y[j][k], y[j][k + 8]}, inverse, rounder),
                                           quantised((v16){y[j][k + 1], y[j][k + 9]}, inverse, rounder));
                large += count_large(t);
                store(out + 16 * k, t, stream);
            }
            if (__builtin_expect(large >= GCK_MOST_LARGE, 0)) {
                scales[first + j] = encode_odd(GCK_INT8, dtype, group, index + first + j, out);
            }
        }
    }
}

/* ---- decode ---- */

/* The steps whose products with an integer are all normal: see round_to_bf16(). */
INLINE int step_is_ordinary(uint16_t scale) { return scale >= 0x1080u && scale < 0x7F80u; }

INLINE __m256 step_of(uint16_t scale)
{
    return _mm256_set1_ps(gck_float((uint32_t)scale << 16) * 0x1p-32f);
}

/* code + 128 + 2^15, of the codes that `bytes` moves to bits 8..15 of the lanes.  With
 * 9 bits, 2^15 + 128 times a step is exact, and so is the fused difference. */
INLINE __m256 biased(__m256i codes, __m256i bytes, __m256i exponent)
{
    return _mm256_castsi256_ps(_mm256_xor_si256(_mm256_shuffle_epi8(codes, bytes), exponent));
}

INLINE void decode_plain(gck_dtype dtype, const uint8_t *codes, const uint16_t *scales, int64_t ngroups, void *x,
                         int64_t index, int stream)
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
        if (!step_is_ordinary(scales[g]) && !is_zero_group(codes, scales[g])) {
            decode_odd(GCK_INT8_PLAIN, dtype, codes, scales[g], index + g, group);
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

INLINE void butterfly(__m256i *a, __m256i *b)
{
    const __m256i sum = _mm256_add_epi16(*a, *b);
    *b = _mm256_sub_epi16(*a, *b);
    *a = sum;
}

/* Moves the index bits (32-bit lane, 64-bit half, register) of two registers round by
 * one: the bit of the halves becomes the one that butterfly() works on. */
INLINE void turn(__m256i *a, __m256i *b)
{
    const __m256i low = _mm256_unpacklo_epi32(*a, *b);
    *b = _mm256_unpackhi_epi32(*a, *b);
    *a = low;
}

/* H code but for index bit 0: w[k] holds values 16 k .. 16 k + 15.  Integers of 16
 * bits hold every sum (128 x 128 < 2^15), so the order of the stages is free. */
INLINE void rotate_codes(const uint8_t *codes, __m256i w[8])
{
    for (int k = 0; k < 8; k += 2) {
        const __m256i c = _mm256_loadu_si256((const __m256i *)(codes + 16 * k));
        __m256i a = _mm256_srai_epi16(_mm256_unpacklo_epi8(c, c), 8);   /* 0..7, 16..23  */
        __m256i b = _mm256_srai_epi16(_mm256_unpackhi_epi8(c, c), 8);   /* 8..15, 24..31 */
        butterfly(&a, &b);                                              /* bit 3 */
        w[k] = _mm256_permute2x128_si256(a, b, 0x20);
        w[k + 1] = _mm256_permute2x128_si256(a, b, 0x31);
        butterfly(&w[k], &w[k + 1]);                                    /* bit 4 */
        turn(&w[k], &w[k + 1]);
        butterfly(&w[k], &w[k + 1]);                                    /* bit 2 */
        turn(&w[k], &w[k + 1]);
        butterfly(&w[k], &w[k + 1]);                                    /* bit 1 */
        turn(&w[k], &w[k + 1]);
    }
    for (int k = 0; k < 2; k++) {
        butterfly(&w[k], &w[k + 2]);                                    /* bit 5 */
        butterfly(&w[k + 4], &w[k + 6]);
        butterfly(&w[k], &w[k + 4]);                                    /* bit 6 */
        butterfly(&w[k + 2], &w[k + 6]);
    }
}

INLINE void decode_rotated(gck_dtype dtype, const uint8_t *codes, const uint16_t *scales, int64_t ngroups, void *x,
                           int64_t index, int stream)
{
    const __m256i sum = kept(0x00010001u), difference = kept(0xFFFF0001u);
    const size_t stride = group_nbytes(dtype);
    const store_constants c = store_constants_of();
    __m256i w[2][8];
    char *group = x;

    if (ngroups > 0) {
        rotate_codes(codes, w[0]);
    }
    for (int64_t g = 0; g < ngroups; g++, codes += GCK_GROUP, group += stride) {
        /* One group ahead: the two halves of the work overlap. */
        const __m256i *now = w[g & 1];
        rotate_codes(codes + (g + 1 < ngroups ? GCK_GROUP : 0), w[~g & 1]);
        if (!step_is_ordinary(scales[g]) && !is_zero_group(codes, scales[g])) {
            decode_odd(GCK_INT8, dtype, codes, scales[g], index + g, group);
            continue;
        }
        const __m256 step = step_of(scales[g]);
        const __m256i *flips = signs_of(index + g);
        for (int k = 0; k < 8; k++) {                                   /* bit 0, and to 32 bits */
            const __m256 even = _mm256_cvtepi32_ps(_mm256_madd_epi16(now[k], sum));
            const __m256 odd = _mm256_cvtepi32_ps(_mm256_madd_epi16(now[k], difference));
            store16(group, dtype, k, (v16){_mm256_mul_ps(even, step), _mm256_mul_ps(odd, step)},
                    _mm256_load_si256(flips + k), c, stream);
        }
    }
}

/* ---- kernels ---- */

#define KERNELS(format, dtype, encode, decode)                                                      \
    void gck_avx2_encode_##format##_##dtype(const void *x, int64_t ngroups, uint8_t *codes,         \
                                            uint16_t *scales, int64_t index, int streaming)         \
    {                                                                                               \
        STREAMED(encode, codes, dtype, x, ngroups, codes, scales, index)                                   \
    }                                                                                               \
    void gck_avx2_decode_##format##_##dtype(const uint8_t *codes, const uint16_t *scales,           \
                                            int64_t ngroups, void *x, int64_t index, int streaming) \
    {                                                                                               \
        STREAMED(decode, x, dtype, codes, scales, ngroups, x, index)                                       \
    }
KERNELS(GCK_INT8, GCK_F32, encode_rotated, decode_rotated)
KERNELS(GCK_INT8, GCK_F16, encode_rotated, decode_rotated)
KERNELS(GCK_INT8, GCK_BF16, encode_rotated, decode_rotated)
KERNELS(GCK_INT8_PLAIN, GCK_F32, encode_plain, decode_plain)
KERNELS(GCK_INT8_PLAIN, GCK_F16, encode_plain, decode_plain)
KERNELS(GCK_INT8_PLAIN, GCK_BF16, encode_plain, decode_plain)

#else
typedef int gck_int8_avx2_is_empty;      /* C wants something in every file */
#endif
