/* doubt_avx2.h: gck_is_doubtful() of a batch of groups, for AVX2. */
#ifndef GRADCKPT_DOUBT_AVX2_H
#define GRADCKPT_DOUBT_AVX2_H

#include "codec/x86/avx2.h"

/* What the values of a batch are, each group in one lane: the largest of them and of the negated, at
 * least 0, as integers that order like them (a 16-bit dtype in the upper halves).  negative: how many of
 * the first 32 are. */
typedef struct {
    __m256i              high, low;
    _Alignas(8) uint8_t  negative[BATCH];
} batch_signs;

/* Words of 16 bits of 8 groups: lane j of the lower half has the largest of the lower half of m[j], lane j
 * of the upper half that of the upper one, without signs. */
INLINE __m256i word_maxima_of_batch(const __m256i m[BATCH])
{
    __m256i two[4], four[2];

    for (int j = 0; j < 4; j++) {
        two[j] = _mm256_max_epu16(_mm256_unpacklo_epi16(m[2 * j], m[2 * j + 1]),
                                  _mm256_unpackhi_epi16(m[2 * j], m[2 * j + 1]));
    }
    for (int j = 0; j < 2; j++) {
        four[j] = _mm256_max_epu16(_mm256_unpacklo_epi32(two[2 * j], two[2 * j + 1]),
                                   _mm256_unpackhi_epi32(two[2 * j], two[2 * j + 1]));
    }
    return _mm256_max_epu16(_mm256_unpacklo_epi64(four[0], four[1]), _mm256_unpackhi_epi64(four[0], four[1]));
}

INLINE __m128i halves_max(__m256i v)
{
    return _mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

/* Of one group.  Negative values are the larger ones without a sign. */
INLINE uint8_t signs_of_group(const char *group, gck_dtype dtype, __m256i *high, __m256i *low)
{
    const __m256i *p = (const __m256i *)group;
    __m256i h = _mm256_setzero_si256(), l = h;

    for (int k = 0; k < (dtype == GCK_F32 ? 16 : 8); k++) {
        const __m256i v = _mm256_loadu_si256(p + k);
        h = dtype == GCK_F32 ? _mm256_max_epi32(h, v) : _mm256_max_epi16(h, v);
        l = dtype == GCK_F32 ? _mm256_max_epu32(l, v) : _mm256_max_epu16(l, v);
    }
    const __m256i a = _mm256_loadu_si256(p), b = _mm256_loadu_si256(p + 1);
    if (dtype == GCK_F32) {
        const __m256i c = _mm256_loadu_si256(p + 2), d = _mm256_loadu_si256(p + 3);
        *high = h;
        *low = _mm256_and_si256(_mm256_and_si256(l, _mm256_srai_epi32(l, 31)), _mm256_set1_epi32(0x7FFFFFFF));
        return (uint8_t)__builtin_popcount((uint32_t)_mm256_movemask_epi8(
            _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d))));
    }
    *high = _mm256_inserti128_si256(_mm256_castsi128_si256(halves_max(h)), halves_max(l), 1);
    return (uint8_t)__builtin_popcount((uint32_t)_mm256_movemask_epi8(_mm256_packs_epi16(a, b)));
}

INLINE batch_signs signs_of_batch(const char *group, gck_dtype dtype, int n)
{
    const size_t stride = group_nbytes(dtype);
    __m256i high[BATCH], low[BATCH];
    batch_signs s;

    if (__builtin_expect(n == BATCH, 1)) {
        for (int j = 0; j < BATCH; j++) {
            s.negative[j] = signs_of_group(group + (size_t)j * stride, dtype, high + j, low + j);
        }
    } else {
        for (int j = 0; j < BATCH; j++) {
            high[j] = low[j] = _mm256_setzero_si256();
            s.negative[j] = 0;
            if (j < n) {
                s.negative[j] = signs_of_group(group + (size_t)j * stride, dtype, high + j, low + j);
            }
        }
    }
    if (dtype == GCK_F32) {
        s.high = maxima_of_batch(high);
        s.low = maxima_of_batch(low);
    } else {
        const __m256i both = word_maxima_of_batch(high);
        const __m256i l = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(both, 1)), 16);
        s.high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(both)), 16);
        s.low = _mm256_and_si256(_mm256_and_si256(l, _mm256_srai_epi32(l, 31)), _mm256_set1_epi32(0x7FFFFFFF));
    }
    return s;
}

/* Bit j: group j has few negative values, or few others. */
INLINE int one_sign_prevails(const batch_signs *s)
{
    const __m128i n = _mm_loadl_epi64((const __m128i *)s->negative);
    const __m128i few = _mm_cmpgt_epi8(_mm_set1_epi8(GCK_FEW_NEGATIVE), n);
    return _mm_movemask_epi8(_mm_or_si128(few, _mm_cmpgt_epi8(n, _mm_set1_epi8(GCK_MANY_NEGATIVE)))) & 0xFF;
}

/* Bit j: group j is doubtful, or has an escape; amax: of its y, float32 bits. */
INLINE int doubtful_groups(const char *group, gck_dtype dtype, int n, const batch_signs *s, __m256i amax,
                           load_constants c)
{
    const __m256 y = _mm256_castsi256_ps(amax);
    const __m256i raw = _mm256_max_epi32(s->high, s->low), bits = as_floats(raw, dtype, c);
    const __m256 largest = _mm256_castsi256_ps(bits);
    const __m256 smaller = _mm256_castsi256_ps(as_floats(_mm256_min_epi32(s->high, s->low), dtype, c));
    const __m256 one_sided = _mm256_cmp_ps(_mm256_mul_ps(smaller, _mm256_set1_ps(4.f)), largest, _CMP_LT_OQ);
    const __m256 flat = _mm256_cmp_ps(y, _mm256_mul_ps(largest, _mm256_set1_ps(GCK_FLAT)), _CMP_GT_OQ);
    const __m256 peaked = _mm256_cmp_ps(y, _mm256_mul_ps(largest, _mm256_set1_ps(GCK_PEAKED)), _CMP_LT_OQ);
    const __m256i escapes = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32((int)gck_limit(dtype)));
    const __m256 any = _mm256_or_ps(_mm256_or_ps(one_sided, flat), _mm256_castsi256_ps(escapes));
    int doubt = one_sign_prevails(s) | _mm256_movemask_ps(any);
    _Alignas(32) uint32_t m[BATCH];

    _mm256_store_si256((__m256i *)m, raw);
    for (int left = _mm256_movemask_ps(peaked) & ~doubt & ((1 << n) - 1); left != 0; left &= left - 1) {
        const int j = __builtin_ctz((unsigned)left);
        doubt |= few_are_far(dtype, group + (size_t)j * group_nbytes(dtype), dtype == GCK_F32 ? m[j] : m[j] >> 16) << j;
    }
    return doubt;
}

#endif
