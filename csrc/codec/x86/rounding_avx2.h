/* rounding_avx2.h: float32 to the integers of codes for AVX2: to nearest, and stochastic, by Philox,
 * four counters at a time. */
#ifndef GRADCKPT_ROUNDING_AVX2_H
#define GRADCKPT_ROUNDING_AVX2_H

#include "codec/x86/codebook_avx2.h"

/* ---- bits ---- */

/* All rounds but the first two, which are the same for all counters of a group except for one
 * product each. */
enum { VECTOR_ROUNDS = GCK_PHILOX_ROUNDS - 2 };

typedef struct {
    const gck_dither *dither;
    __m256i           key0[VECTOR_ROUNDS], key1[VECTOR_ROUNDS];
} philox;

INLINE philox philox_of(const gck_dither *d)
{
    philox p = {.dither = d};

    for (uint32_t r = 0; d != NULL && r < VECTOR_ROUNDS; r++) {
        p.key0[r] = _mm256_set1_epi64x((uint32_t)d->seed + (r + 2) * GCK_PHILOX_W0);
        p.key1[r] = _mm256_set1_epi64x((uint32_t)(d->seed >> 32) + (r + 2) * GCK_PHILOX_W1);
    }
    return p;
}

INLINE __m256i kept64(uint32_t lane)
{
    __m256i v = _mm256_set1_epi64x(lane);
    __asm__("" : "+x"(v));
    return v;
}

INLINE __m256i upper_word(__m256i v) { return _mm256_srli_epi64(v, 32); }

/* Four counters: each word in the lower halves of 64-bit lanes; the upper halves are ignored. */
typedef struct {
    __m256i c0, c1, c2, c3;
} counters;

INLINE void philox_round(counters *c, __m256i m0, __m256i m1, __m256i key0, __m256i key1)
{
    const __m256i p0 = _mm256_mul_epu32(c->c0, m0), p1 = _mm256_mul_epu32(c->c2, m1);
    c->c0 = _mm256_xor_si256(upper_word(p1), _mm256_xor_si256(c->c1, key0));
    c->c2 = _mm256_xor_si256(upper_word(p0), _mm256_xor_si256(c->c3, key1));
    c->c1 = p1;
    c->c3 = p0;
}

/* gck_noise_of_group(): noise[k] has the bits of values 16 k .. 16 k + 15.  Eight counters run side
 * by side, because a round waits for its products. */
INLINE void noise_of_group(const philox *p, int64_t group, __m256i noise[8])
{
    const gck_dither *d = p->dither;
    const uint64_t block = (uint64_t)group * (GCK_GROUP / GCK_PHILOX_VALUES);
    const uint32_t k0 = (uint32_t)d->seed, k1 = (uint32_t)(d->seed >> 32);
    const uint64_t first = (uint64_t)GCK_PHILOX_M1 * d->tensor;
    const uint64_t second = (uint64_t)GCK_PHILOX_M0 * ((uint32_t)(first >> 32) ^ (uint32_t)(block >> 32) ^ k0);
    const __m256i m0 = kept64(GCK_PHILOX_M0), m1 = kept64(GCK_PHILOX_M1);
    const __m256i key = _mm256_set1_epi64x(d->step ^ k1);
    const __m256i next0 = _mm256_set1_epi64x((uint32_t)first ^ (k0 + GCK_PHILOX_W0));
    const __m256i next1 = _mm256_set1_epi64x((uint32_t)(second >> 32) ^ (k1 + GCK_PHILOX_W1));

    for (int half = 0; half < 2; half++) {
        counters c[2];
        for (int i = 0; i < 2; i++) {
            const __m256i number = _mm256_add_epi64(_mm256_set1_epi64x((uint32_t)block + 8u * (uint32_t)half),
                                                    _mm256_setr_epi64x(4 * i, 4 * i + 2, 4 * i + 1, 4 * i + 3));
            const __m256i a = _mm256_mul_epu32(number, m0);
            const __m256i b = _mm256_mul_epu32(_mm256_xor_si256(upper_word(a), key), m1);
            c[i] = (counters){_mm256_xor_si256(upper_word(b), next0), b, _mm256_xor_si256(a, next1),
                              _mm256_set1_epi64x((uint32_t)second)};
        }
        for (int r = 0; r < VECTOR_ROUNDS; r++) {
            philox_round(&c[0], m0, m1, p->key0[r], p->key1[r]);
            philox_round(&c[1], m0, m1, p->key0[r], p->key1[r]);
        }
        for (int i = 0; i < 2; i++) {
            const __m256i low = _mm256_blend_epi32(c[i].c0, _mm256_slli_epi64(c[i].c1, 32), 0xAA);
            const __m256i high = _mm256_blend_epi32(c[i].c2, _mm256_slli_epi64(c[i].c3, 32), 0xAA);
            noise[4 * half + 2 * i] = _mm256_unpacklo_epi64(low, high);          /* lanes 0, 2: counters 0, 1 */
            noise[4 * half + 2 * i + 1] = _mm256_unpackhi_epi64(low, high);      /* lanes 1, 3: counters 2, 3 */
        }
    }
}

/* gck_uniform(): exact. */
INLINE v16 uniforms(__m256i noise)
{
    const __m256 unit = _mm256_set1_ps(0x1p-16f), half = _mm256_set1_ps(0x1p-17f);
    const __m256i even = _mm256_and_si256(noise, _mm256_set1_epi32(0xFFFF));
    return (v16){_mm256_fmadd_ps(_mm256_cvtepi32_ps(even), unit, half),
                 _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(noise, 16)), unit, half)};
}

/* ---- integers ---- */

INLINE __m256i words_of(__m256i even, __m256i odd)
{
    return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
}

/* 16 codes in 16-bit lanes.  The fused sum rounds the exact product, as
 * gck_round_product() does. */
INLINE __m256i quantised(v16 v, __m256 inverse, __m256 rounder)
{
    const __m256i even = _mm256_castps_si256(_mm256_fmadd_ps(v.even, inverse, rounder));
    const __m256i odd = _mm256_castps_si256(_mm256_fmadd_ps(v.odd, inverse, rounder));
    return words_of(even, odd);
}

/* The steps whose products with an integer are all normal: see round_to_bf16(). */
INLINE int step_is_ordinary(uint32_t stored) { return stored >= 0x1080u && stored < 0x7F80u; }

INLINE __m256 step_of(uint32_t stored)
{
    return _mm256_set1_ps(gck_float(stored << 16) * 0x1p-32f);
}

/* gck_round_noisy() of 16 p = x * inv, in 16-bit lanes; not yet limited to `top` in magnitude. */
INLINE __m256i rounded_noisy(v16 p, __m256i noise)
{
    const v16 u = uniforms(noise);
    return words_of(_mm256_cvtps_epi32(_mm256_floor_ps(_mm256_add_ps(p.even, u.even))),
                    _mm256_cvtps_epi32(_mm256_floor_ps(_mm256_add_ps(p.odd, u.odd))));
}

/* 32 bytes of two times 16 such values, in the order of packs, within +-127. */
INLINE __m256i noisy_bytes(__m256i a, __m256i b)
{
    return _mm256_max_epi8(_mm256_packs_epi16(a, b), _mm256_set1_epi8(-127));
}

/* gck_count_large() of 128 y in steps. */
INLINE int count_large_noisy(const __m256 p[16])
{
    __m256i n = _mm256_setzero_si256();

    for (int k = 0; k < 16; k++) {
        const __m256 up = _mm256_cmp_ps(p[k], _mm256_set1_ps(63.5f), _CMP_GE_OQ);
        const __m256 down = _mm256_cmp_ps(p[k], _mm256_set1_ps(-64.5f), _CMP_LT_OQ);
        n = _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_or_ps(up, down)));
    }
    const __m256i sums = _mm256_sad_epu8(n, _mm256_setzero_si256());
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 2);
}

/* ---- levels ----
 *
 * gck_level_code_noisy(): |p| has n levels L + 1/2 below it.  With -1.5 (int4: -5.5) before
 * them, e(n) + 1/2 <= |p| < e(n + 1) + 1/2 or so; e(n + 1) = L(n), the gap is e(n + 1) - e(n).
 * Below zero the interval is the mirror image.  The upper end is reached, or not, in float32;
 * everything else is done in bytes.  One beyond the last level counts as one below it: it
 * moves there always. */

/* The number n of levels with M = floor(|p| + 1/2), M > L, for 32 values: at least one level is
 * below, at most all but one. */
INLINE __m256i levels_below(gck_format format, int uniform, __m256i m)
{
    if (format == GCK_INT4) {
        const __m256i offsets = TABLE_OF(GCK_INT4_NOISY_OFFSETS);
        const __m256i h = _mm256_and_si256(_mm256_srli_epi16(m, 3), _mm256_set1_epi8(15));
        const __m256i n = _mm256_srli_epi16(_mm256_add_epi8(m, _mm256_shuffle_epi8(offsets, h)), 4);
        return _mm256_min_epu8(_mm256_and_si256(n, _mm256_set1_epi8(15)), _mm256_set1_epi8(7));
    }
    const __m256i zero = _mm256_setzero_si256();
    const __m256i fine = _mm256_and_si256(_mm256_srli_epi16(m, 1), _mm256_set1_epi8(127));
    __m256i n = _mm256_avg_epu8(fine, zero);                              /* (m + 2) >> 2 */
    if (!uniform) {
        const __m256i quarter = _mm256_and_si256(_mm256_srli_epi16(fine, 1), _mm256_set1_epi8(63));
        const __m256i coarse = _mm256_avg_epu8(quarter, _mm256_set1_epi8(32));      /* 16 + ((m + 4) >> 3) */
        n = _mm256_min_epu8(_mm256_min_epu8(fine, _mm256_add_epi8(n, _mm256_set1_epi8(4))), coarse);
    }
    return _mm256_min_epu8(n, _mm256_set1_epi8(31));
}

/* L(n), and its distance to the level before. */
INLINE void interval_of(gck_format format, int uniform, __m256i n, __m256i *level, __m256i *gap)
{
    if (format == GCK_INT4) {
        *level = _mm256_shuffle_epi8(TABLE_OF(GCK_INT4_LEVELS), n);
        *gap = _mm256_shuffle_epi8(TABLE_OF(GCK_INT4_GAPS), n);
        return;
    }
    const int6_levels levels = int6_levels_of(uniform);
    const __m256i upper = _mm256_slli_epi16(n, 3);                        /* bit 4 to bit 7 */
    *level = _mm256_blendv_epi8(_mm256_shuffle_epi8(levels.low, n), _mm256_shuffle_epi8(levels.high, n), upper);
    *gap = uniform ? _mm256_blendv_epi8(_mm256_shuffle_epi8(TABLE_OF(GCK_UNIFORM_GAPS_LOW), n),
                                        _mm256_set1_epi8(4), upper)
                   : _mm256_blendv_epi8(_mm256_shuffle_epi8(TABLE_OF(GCK_INT6_GAPS_LOW), n),
                                        _mm256_shuffle_epi8(TABLE_OF(GCK_INT6_GAPS_HIGH), n), upper);
}

/* +-floor(|p| + 1/2): exact, because the sum with a p just below a half is representable. */
INLINE __m256i sizes_of(__m256 p)
{
    const __m256 half = _mm256_or_ps(_mm256_and_ps(p, _mm256_set1_ps(-0.f)), _mm256_set1_ps(0.5f));
    return _mm256_cvttps_epi32(_mm256_add_ps(p, half));
}

/* Bytes first, first + 2, ... + 6 of each half, as the second of 32-bit lanes: 2^15 + byte. */
INLINE __m256 floats_of(__m256i bytes, int first)
{
    const __m256i places = _mm256_setr_epi8(-1, (char)first, -1, -1, -1, (char)(first + 2), -1, -1,
                                            -1, (char)(first + 4), -1, -1, -1, (char)(first + 6), -1, -1,
                                            -1, (char)first, -1, -1, -1, (char)(first + 2), -1, -1,
                                            -1, (char)(first + 4), -1, -1, -1, (char)(first + 6), -1, -1);
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_shuffle_epi8(bytes, places), _mm256_set1_epi32(0x47000000)));
}

/* All ones where p comes to the upper end of its interval, `high` - 127.5. */
INLINE __m256i goes_up(__m256 p, __m256 u, __m256i high, __m256i gap, int first)
{
    const __m256 end = _mm256_sub_ps(floats_of(high, first), _mm256_set1_ps(0x1p15f + 127.5f));
    const __m256 width = _mm256_sub_ps(floats_of(gap, first), _mm256_set1_ps(0x1p15f));
    return _mm256_castps_si256(_mm256_cmp_ps(_mm256_fmadd_ps(width, u, p), end, _CMP_GE_OQ));
}

/* Codes of values 32 i .. 32 i + 31 as two packs leave them; a, b: their y in steps. */
INLINE __m256i noisy_codes(gck_format format, int uniform, v16 a, v16 b, __m256i noise_a, __m256i noise_b)
{
    const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi8(1);
    const __m256i t = _mm256_packs_epi16(words_of(sizes_of(a.even), sizes_of(a.odd)),
                                         words_of(sizes_of(b.even), sizes_of(b.odd)));
    const __m256i negative = _mm256_cmpgt_epi8(zero, t);
    const __m256i n = levels_below(format, uniform, _mm256_abs_epi8(t));
    const v16 ua = uniforms(noise_a), ub = uniforms(noise_b);
    __m256i level, gap;

    interval_of(format, uniform, n, &level, &gap);
    /* The upper end of an interval below zero: ~e(n) = ~(L(n) - gap). */
    const __m256i end = _mm256_add_epi8(_mm256_xor_si256(level, negative), _mm256_and_si256(gap, negative));
    const __m256i high = _mm256_xor_si256(end, _mm256_set1_epi8(-128));
    const __m256i up = _mm256_packs_epi16(
        _mm256_blend_epi16(goes_up(a.even, ua.even, high, gap, 0), goes_up(a.odd, ua.odd, high, gap, 1), 0xAA),
        _mm256_blend_epi16(goes_up(b.even, ub.even, high, gap, 8), goes_up(b.odd, ub.odd, high, gap, 9), 0xAA));
    const __m256i outward = _mm256_xor_si256(up, negative);
    const __m256i index = _mm256_subs_epu8(n, _mm256_andnot_si256(outward, one));
    /* Inward from the smallest level is across zero. */
    const __m256i across = _mm256_andnot_si256(outward, _mm256_cmpeq_epi8(n, zero));
    const __m256i sign = _mm256_set1_epi8((char)gck_sign_bit(format));
    return _mm256_or_si256(index, _mm256_and_si256(_mm256_xor_si256(negative, across), sign));
}

#endif
