/* doubt_avx512.h: gck_is_doubtful() of a group, for AVX-512. */
#ifndef GRADCKPT_DOUBT_AVX512_H
#define GRADCKPT_DOUBT_AVX512_H

#include "codec/x86/avx512.h"

/* What the values of up to TILE groups are.  raw: the largest |x| in the bits of the dtype; peaked, flat: it
 * times GCK_PEAKED and GCK_FLAT.  doubtful: bit i: group i is, whatever its y; also when it has an escape. */
typedef struct {
    uint32_t raw[TILE];
    float    peaked[TILE], flat[TILE];
    uint32_t doubtful;
} tile_signs;

/* The maxima of the words of one group: four of the numbers, at least 0, and four of their bits; of these,
 * negative ones are the larger ones.  Returns how many of the first 32 are negative. */
INLINE int signs_of_group(gck_dtype dtype, const void *x, __m128i *maxima)
{
    const char *at = x;
    __m512i v[8], h = all32(0), l = h;

    for (int k = 0; k < (dtype == GCK_F32 ? 8 : 4); k++) {
        v[k] = _mm512_loadu_si512(at + 64 * k);
        h = dtype == GCK_F32 ? _mm512_max_epi32(h, v[k]) : _mm512_max_epi16(h, v[k]);
        l = dtype == GCK_F32 ? _mm512_max_epu32(l, v[k]) : _mm512_max_epu16(l, v[k]);
    }
    const __m256i h0 = _mm512_castsi512_si256(h), h1 = _mm512_extracti64x4_epi64(h, 1);
    const __m256i l0 = _mm512_castsi512_si256(l), l1 = _mm512_extracti64x4_epi64(l, 1);
    const __m256i a = _mm256_permute2x128_si256(h0, l0, 0x20), b = _mm256_permute2x128_si256(h0, l0, 0x31);
    const __m256i c = _mm256_permute2x128_si256(h1, l1, 0x20), d = _mm256_permute2x128_si256(h1, l1, 0x31);
    __m128i low, high;
    if (dtype == GCK_F32) {
        const __m256i both = _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
        low = _mm256_castsi256_si128(both);
        high = _mm256_extracti128_si256(both, 1);
        *maxima = _mm_max_epu32(_mm_unpacklo_epi64(low, high), _mm_unpackhi_epi64(low, high));
        return __builtin_popcount(_mm512_movepi32_mask(v[0]) | (uint32_t)_mm512_movepi32_mask(v[1]) << 16);
    }
    const __m256i both = _mm256_max_epu16(_mm256_max_epu16(a, b), _mm256_max_epu16(c, d));
    low = _mm256_castsi256_si128(both);
    high = _mm256_extracti128_si256(both, 1);
    *maxima = _mm_max_epu16(_mm_unpacklo_epi64(low, high), _mm_unpackhi_epi64(low, high));
    return __builtin_popcount(_mm512_movepi16_mask(v[0]));
}

TABLE uint32_t even_words[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
TABLE uint32_t odd_words[16] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};

/* Bits of the dtype, without a sign, as float32. */
INLINE __m512i floats_of_raw(gck_dtype dtype, __m512i raw)
{
    return dtype == GCK_F32 ? raw
        : dtype == GCK_BF16 ? _mm512_slli_epi32(raw, 16)
        : _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(raw)));
}

INLINE void signs_of_tile(gck_dtype dtype, const void *x, int n, tile_signs *t)
{
    _Alignas(64) __m128i maxima[TILE];
    _Alignas(64) uint32_t pairs[2 * TILE];
    uint32_t many = 0;

    for (int i = 0; i < TILE; i++) {
        maxima[i] = _mm_setzero_si128();
        if (i < n) {
            const int negative = signs_of_group(dtype, (const char *)x + (size_t)i * group_nbytes(dtype), maxima + i);
            many |= (uint32_t)((uint32_t)(negative - GCK_FEW_NEGATIVE) > GCK_MANY_NEGATIVE - GCK_FEW_NEGATIVE) << i;
        }
    }
    for (int i = 0; i < TILE; i += 4) {
        __m512i m = _mm512_loadu_si512(maxima + i);
        const __m512i other = _mm512_srli_epi64(m, 32);
        m = dtype == GCK_F32 ? _mm512_max_epu32(m, other) : _mm512_max_epu16(m, other);
        m = dtype == GCK_F32 ? m : _mm512_max_epu16(m, _mm512_srli_epi64(m, 16));
        _mm256_storeu_si256((__m256i *)(pairs + 2 * i), _mm512_cvtepi64_epi32(m));
    }
    const __m512 first = table_ps((const float *)pairs), last = table_ps((const float *)pairs + TILE);
    const __m512i even = _mm512_loadu_si512(even_words), odd = _mm512_loadu_si512(odd_words);
    const uint32_t sign = dtype == GCK_F32 ? 0x80000000u : 0x8000u;
    __m512i h = _mm512_castps_si512(_mm512_permutex2var_ps(first, even, last));
    __m512i l = _mm512_castps_si512(_mm512_permutex2var_ps(first, odd, last));
    h = _mm512_and_si512(h, all32(sign - 1u));
    l = _mm512_and_si512(l, all32(2u * sign - 1u));
    const __mmask16 some = _mm512_cmplt_epu32_mask(all32(sign - 1u), l);           /* some are negative */
    l = _mm512_mask_blend_epi32(some, all32(0), _mm512_and_si512(l, all32(sign - 1u)));
    const __m512i raw = _mm512_max_epu32(h, l), bits = floats_of_raw(dtype, raw);
    const __m512 largest = _mm512_castsi512_ps(bits);
    const __m512 smaller = _mm512_castsi512_ps(floats_of_raw(dtype, _mm512_min_epu32(h, l)));

    _mm512_storeu_si512(t->raw, raw);
    _mm512_storeu_si512(t->peaked, _mm512_castps_si512(_mm512_mul_ps(largest, _mm512_set1_ps(GCK_PEAKED))));
    _mm512_storeu_si512(t->flat, _mm512_castps_si512(_mm512_mul_ps(largest, _mm512_set1_ps(GCK_FLAT))));
    t->doubtful = many | _mm512_cmplt_epu32_mask(all32(gck_limit(dtype)), bits)
        | _mm512_cmp_ps_mask(_mm512_mul_ps(smaller, _mm512_set1_ps(4.f)), largest, _CMP_LT_OQ);
}

/* Of group i, whose first value is at x; amax: of its y. */
INLINE int is_doubtful(gck_dtype dtype, const void *x, const tile_signs *t, int i, uint32_t amax)
{
    const float y = gck_float(amax);

    return (t->doubtful >> i & 1u) | (y > t->flat[i]) || (y < t->peaked[i] && few_are_far(dtype, x, t->raw[i]));
}

#endif
