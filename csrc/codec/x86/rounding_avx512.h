/* rounding_avx512.h: float32 to the integers of codes for AVX-512: to nearest, and stochastic, by Philox,
 * eight counters at a time. */
#ifndef GRADCKPT_ROUNDING_AVX512_H
#define GRADCKPT_ROUNDING_AVX512_H

#include "codec/x86/codebook_avx512.h"

/* ---- bits ---- */

/* All rounds but the first two, which are the same for all counters of a group except for one
 * product each. */
enum { VECTOR_ROUNDS = GCK_PHILOX_ROUNDS - 2 };

INLINE __m512i all64(uint32_t word) { return _mm512_set1_epi64((long long)word); }

typedef struct {
    const gck_dither *dither;                      /* NULL: to nearest, and there are no keys */
    __m512i           key0[VECTOR_ROUNDS], key1[VECTOR_ROUNDS];
} philox;

INLINE philox philox_of(const gck_dither *d)
{
    philox p = {.dither = d};

    for (uint32_t r = 0; d != NULL && r < VECTOR_ROUNDS; r++) {
        p.key0[r] = all64((uint32_t)d->seed + (r + 2) * GCK_PHILOX_W0);
        p.key1[r] = all64((uint32_t)(d->seed >> 32) + (r + 2) * GCK_PHILOX_W1);
    }
    return p;
}

INLINE __m512i xor3(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }

/* Unpacking brings the even lanes of 64 bits together, then the odd ones. */
TABLE uint64_t counters[8] = {0, 4, 1, 5, 2, 6, 3, 7};

/* gck_noise_of_group(): noise[k] has the bits of values 32 k .. 32 k + 31.  A counter's words are
 * the lower halves of 64-bit lanes; the upper halves are ignored. */
INLINE void noise_of_group(const philox *p, int64_t group, __m512i noise[4])
{
    const gck_dither *d = p->dither;
    const uint64_t block = (uint64_t)group * (GCK_GROUP / GCK_PHILOX_VALUES);
    const uint32_t k0 = (uint32_t)d->seed, k1 = (uint32_t)(d->seed >> 32);
    const uint64_t first = (uint64_t)GCK_PHILOX_M1 * d->tensor;
    const uint64_t second = (uint64_t)GCK_PHILOX_M0 * ((uint32_t)(first >> 32) ^ (uint32_t)(block >> 32) ^ k0);
    const __m512i m0 = all64(GCK_PHILOX_M0), m1 = all64(GCK_PHILOX_M1);
    const __m512i next0 = all64((uint32_t)first ^ (k0 + GCK_PHILOX_W0));
    const __m512i next1 = all64((uint32_t)(second >> 32) ^ (k1 + GCK_PHILOX_W1));

    for (uint32_t h = 0; h < 2; h++) {
        const __m512i number = _mm512_add_epi64(_mm512_loadu_si512(counters), all64((uint32_t)block + 8 * h));
        const __m512i a = _mm512_mul_epu32(number, m0);
        const __m512i b = _mm512_mul_epu32(_mm512_xor_si512(_mm512_srli_epi64(a, 32), all64(d->step ^ k1)), m1);
        __m512i c0 = _mm512_xor_si512(_mm512_srli_epi64(b, 32), next0), c1 = b;
        __m512i c2 = _mm512_xor_si512(a, next1), c3 = all64((uint32_t)second);
        for (int r = 0; r < VECTOR_ROUNDS; r++) {
            const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
            c0 = xor3(_mm512_srli_epi64(p1, 32), c1, p->key0[r]);
            c2 = xor3(_mm512_srli_epi64(p0, 32), c3, p->key1[r]);
            c1 = p1;
            c3 = p0;
        }
        const __m512i low = _mm512_mask_blend_epi32(0xAAAAu, c0, _mm512_slli_epi64(c1, 32));
        const __m512i high = _mm512_mask_blend_epi32(0xAAAAu, c2, _mm512_slli_epi64(c3, 32));
        noise[2 * h] = _mm512_unpacklo_epi64(low, high);
        noise[2 * h + 1] = _mm512_unpackhi_epi64(low, high);
    }
}

/* Move the bits to 32-bit lanes, for the lo and the hi of a pair. */
INLINE void noise_of_pair(const constants *c, gck_dtype dtype, __m512i noise, __m512i *lo, __m512i *hi)
{
    if (dtype == GCK_BF16) {
        *lo = _mm512_andnot_si512(c->upper, noise);
        *hi = _mm512_srli_epi32(noise, 16);
    } else {
        *lo = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(noise));
        *hi = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(noise, 1));
    }
}

/* gck_uniform(): exact. */
INLINE __m512 uniform_of(__m512i noise)
{
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(noise), all_ps(0x1p-16f), all_ps(0x1p-17f));
}

/* ---- integers ---- */

/* 64 integers of 32 bits, in two pairs, to bytes in order. */
INLINE __m512i bytes_of(const constants *c, gck_dtype dtype, const __m512i q[4])
{
    return natural_bytes(_mm512_packs_epi16(merge_lower(c, q[0], q[1]), merge_lower(c, q[2], q[3])), dtype);
}

/* gck_round_product() of 64 values, two pairs.  1.5 x 2^23 + product, rounded once by
 * the FMA, holds the integer in its low bits; ties go to even because the constant is. */
INLINE __m512i quantise(const constants *c, gck_dtype dtype, const __m512 y[4], __m512 inverse)
{
    __m512i q[4];

    for (int j = 0; j < 4; j++) {
        q[j] = _mm512_castps_si512(_mm512_fmadd_ps(y[j], inverse, c->magic));
    }
    return bytes_of(c, dtype, q);
}

/* gck_round_noisy() of 64 p = x * inv. */
INLINE __m512i quantise_noisy(const constants *c, gck_dtype dtype, const __m512 p[4], const __m512i noise[2])
{
    __m512i u[4], q[4];

    noise_of_pair(c, dtype, noise[0], &u[0], &u[1]);
    noise_of_pair(c, dtype, noise[1], &u[2], &u[3]);
    for (int j = 0; j < 4; j++) {
        q[j] = _mm512_cvt_roundps_epi32(_mm512_add_ps(p[j], uniform_of(u[j])),
                                        _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    }
    return _mm512_max_epi8(bytes_of(c, dtype, q), all32(0x81818181u));
}

/* gck_count_large() of 128 y in steps. */
INLINE int count_large_noisy(const __m512 p[8])
{
    int n = 0;

    for (int j = 0; j < 8; j++) {
        const __mmask16 up = _mm512_cmp_ps_mask(p[j], all_ps(63.5f), _CMP_GE_OQ);
        const __mmask16 down = _mm512_cmp_ps_mask(p[j], all_ps(-64.5f), _CMP_LT_OQ);
        n += __builtin_popcount((uint32_t)(up | down));
    }
    return n;
}

/* ---- levels ----
 *
 * gck_level_code_noisy(): |p| has n levels L(0), L(1) .. below it, with their halves; the next
 * is L(n), gap(n) above the one before, and L(0) as far above its mirror image.  Below zero
 * everything is mirrored.  One beyond the last level counts as one below it: it moves there
 * always. */

TABLE int8_t int4_gaps[16] = {GCK_INT4_GAPS};
TABLE int8_t int6_gaps[2][32] = {{GCK_INT6_GAPS_LOW, GCK_INT6_GAPS_HIGH},
                                 {GCK_UNIFORM_GAPS_LOW, GCK_4_OF(GCK_UNIFORM_GAP, 16), GCK_4_OF(GCK_UNIFORM_GAP, 20),
                                  GCK_4_OF(GCK_UNIFORM_GAP, 24), GCK_4_OF(GCK_UNIFORM_GAP, 28)}};
TABLE int8_t int4_noisy_offsets[16] = {GCK_INT4_NOISY_OFFSETS};

INLINE __m512i integers_of_bytes(const int8_t *bytes)
{
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)bytes));
}

/* How many levels of m = floor(|p| + 1/2) are below |p|: L < m, at most all but one. */
INLINE __m512i levels_below(gck_format format, int uniform, __m512i m)
{
    if (format == GCK_INT4) {
        const __m512i offset = _mm512_permutexvar_epi32(_mm512_srli_epi32(m, 3), integers_of_bytes(int4_noisy_offsets));
        return _mm512_min_epu32(_mm512_srli_epi32(_mm512_add_epi32(m, offset), 4), all32(7));
    }
    const __m512i fine = _mm512_srli_epi32(m, 1);
    __m512i n = _mm512_srli_epi32(_mm512_add_epi32(fine, all32(1)), 1);

    if (!uniform) {
        const __m512i coarse = _mm512_srli_epi32(_mm512_add_epi32(_mm512_srli_epi32(fine, 1), all32(33)), 1);
        n = _mm512_min_epu32(_mm512_min_epu32(fine, _mm512_add_epi32(n, all32(4))), coarse);
    }
    return _mm512_min_epu32(n, all32(31));
}

/* Entry n of a table of 32 bytes. */
INLINE __m512 entry_of(const int8_t *low, const int8_t *high, __m512i n)
{
    return _mm512_permutex2var_ps(_mm512_cvtepi32_ps(integers_of_bytes(low)), n,
                                  _mm512_cvtepi32_ps(integers_of_bytes(high)));
}

INLINE void interval_of(gck_format format, int uniform, __m512i n, __m512 *level, __m512 *gap)
{
    if (format == GCK_INT4) {
        *level = entry_of(int4_levels, int4_levels, n);
        *gap = entry_of(int4_gaps, int4_gaps, n);
    } else {
        *level = entry_of(int6_levels[uniform][0], int6_levels[uniform][1], n);
        *gap = entry_of(int6_gaps[uniform], int6_gaps[uniform] + 16, n);
    }
    *level = _mm512_add_ps(*level, all_ps(0.5f));
}

/* 16 codes. */
INLINE __m512i noisy_codes(const constants *c, gck_format format, int uniform, __m512 p, __m512i noise)
{
    const __m512i bits = _mm512_castps_si512(p), one = all32(1);
    const __m512 abs = _mm512_castsi512_ps(_mm512_and_si512(bits, c->abs32));
    /* Exact, because the sum with a p just below a half is representable. */
    const __m512i n = levels_below(format, uniform, _mm512_cvttps_epi32(_mm512_add_ps(abs, all_ps(0.5f))));
    const __mmask16 negative = _mm512_movepi32_mask(bits), some = _mm512_test_epi32_mask(n, n);
    __m512 level, gap;

    interval_of(format, uniform, n, &level, &gap);
    const __m512 end = _mm512_mask_sub_ps(level, negative, gap, level);          /* the upper one */
    const __mmask16 up = _mm512_cmp_ps_mask(_mm512_fmadd_ps(gap, uniform_of(noise), p), end, _CMP_GE_OQ);
    const __mmask16 inward = (__mmask16)~(up ^ negative);
    const __m512i index = _mm512_mask_sub_epi32(n, inward & some, n, one);
    /* Inward from the smallest level is across zero. */
    const __mmask16 sign = (__mmask16)(negative ^ (inward & ~some));
    return _mm512_mask_or_epi32(index, sign, index, all32((uint32_t)gck_sign_bit(format)));
}

/* 64 codes in order, of y in steps. */
INLINE __m512i level_bytes_noisy(const constants *c, gck_format format, gck_dtype dtype, int uniform,
                                 const __m512 p[4], const __m512i noise[2])
{
    __m512i u[4], q[4];

    noise_of_pair(c, dtype, noise[0], &u[0], &u[1]);
    noise_of_pair(c, dtype, noise[1], &u[2], &u[3]);
    for (int j = 0; j < 4; j++) {
        q[j] = noisy_codes(c, format, uniform, p[j], u[j]);
    }
    return bytes_of(c, dtype, q);
}

#endif
