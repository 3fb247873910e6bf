/* rotate_avx512.h: H (d o x) in float32 and H code in integers, for AVX-512. */
#ifndef GRADCKPT_ROTATE_AVX512_H
#define GRADCKPT_ROTATE_AVX512_H

#include "codec/x86/avx512.h"

/* ---- float32, in the order of gck_hadamard() ---- */

/* The signs of 32 words. */
INLINE __m512i negated_words(uint32_t signs) { return _mm512_slli_epi16(_mm512_movm_epi16(signs), 15); }

/* d o v for natural register j of 16 float32. */
INLINE __m512 flip_natural(__m512 v, const uint32_t *signs, int j)
{
    const __mmask16 negated = (__mmask16)(signs[j / 2] >> (j % 2 * 16));
    const __m512i bits = _mm512_castps_si512(v);

    return _mm512_castsi512_ps(_mm512_mask_xor_epi32(bits, negated, bits, all32(0x80000000u)));
}

/* +1 where bit s of the lane's number is 0, else -1. */
TABLE float lane_signs[4][16] = {
    {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
    {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
    {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
    {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
};

INLINE void butterfly(__m512 *a, __m512 *b)
{
    const __m512 sum = _mm512_add_ps(*a, *b);

    *b = _mm512_sub_ps(*a, *b);
    *a = sum;
}

/* The four stages between lanes of one register.  The FMA multiplies by +-1, so that it equals the
 * reference's single addition or subtraction. */
INLINE __m512 lane_stages(__m512 v)
{
    v = _mm512_fmadd_ps(v, table_ps(lane_signs[0]), _mm512_permute_ps(v, 0xB1));
    v = _mm512_fmadd_ps(v, table_ps(lane_signs[1]), _mm512_permute_ps(v, 0x4E));
    v = _mm512_fmadd_ps(v, table_ps(lane_signs[2]), _mm512_shuffle_f32x4(v, v, 0xB1));
    return _mm512_fmadd_ps(v, table_ps(lane_signs[3]), _mm512_shuffle_f32x4(v, v, 0x4E));
}

/* For values 32 k .. 32 k + 31: bit i of `kept`[k / 2] says whether value 64 (k / 2) + i is kept or
 * replaced by zero.  NULL: all are kept. */
INLINE uint32_t kept_of(const uint64_t *kept, int k) { return (uint32_t)(kept[k / 2] >> (32 * (k % 2))); }

INLINE __m512i load_words(const void *x, int k, const uint64_t *kept)
{
    const char *at = (const char *)x + 64 * k;

    return kept == NULL ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi16(kept_of(kept, k), at);
}

/* Natural register j of 16 float32. */
INLINE __m512 load_natural(const void *x, gck_dtype dtype, int j, const uint64_t *kept)
{
    if (kept == NULL) {
        return load16(x, dtype, j);
    }
    const __mmask16 some = (__mmask16)(kept_of(kept, j / 2) >> (16 * (j % 2)));
    return dtype == GCK_F32
        ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(some, (const char *)x + 64 * j))
        : _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, (const char *)x + 32 * j));
}

/* y = H (d o x), in pairs.  Index bit 0 is between lo and hi for bfloat16 (then come the lanes,
 * then the pairs); for other dtypes the lanes are first. */
INLINE void rotate(const constants *c, gck_dtype dtype, const void *x, const uint64_t *kept, const uint32_t *signs,
                   __m512 y[8])
{
    for (int k = 0; k < 4; k++) {
        if (dtype == GCK_BF16) {
            const __m512i w = load_words(x, k, kept);
            split_bf16(c, _mm512_xor_si512(w, negated_words(signs[k])), &y[2 * k], &y[2 * k + 1]);
            butterfly(&y[2 * k], &y[2 * k + 1]);
        } else {
            y[2 * k] = flip_natural(load_natural(x, dtype, 2 * k, kept), signs, 2 * k);
            y[2 * k + 1] = flip_natural(load_natural(x, dtype, 2 * k + 1, kept), signs, 2 * k + 1);
        }
        y[2 * k] = lane_stages(y[2 * k]);
        y[2 * k + 1] = lane_stages(y[2 * k + 1]);
        if (dtype != GCK_BF16) {
            butterfly(&y[2 * k], &y[2 * k + 1]);
        }
    }
    for (int j = 0; j < 2; j++) {
        butterfly(&y[j], &y[j + 2]);
        butterfly(&y[j + 4], &y[j + 6]);
    }
    for (int j = 0; j < 4; j++) {
        butterfly(&y[j], &y[j + 4]);
    }
}

/* Bits of max |y|, which is not finite if any y is not. range_ps prefers a number to a NaN, so it
 * may see only the two results a + b, a - b of a last butterfly: if either of those is not finite,
 * then a or b is NaN and both are NaN, or one of them is Inf.  (With any other two it could lose a
 * NaN: stages can overflow to Inf and on to NaN in all of some outputs while the others are small.)
 * The remaining comparisons are on integers, where NaN is largest. */
INLINE uint32_t rotated_max_bits(const __m512 y[8])
{
    __m512i max[4];

    for (int j = 0; j < 4; j++) {
        max[j] = _mm512_castps_si512(_mm512_range_ps(y[j], y[j + 4], 0x0B));   /* larger |.|, sign 0 */
    }
    return largest_u32(_mm512_max_epu32(_mm512_max_epu32(max[0], max[1]), _mm512_max_epu32(max[2], max[3])));
}

/* ---- integers ---- */

INLINE void butterfly16(__m512i *a, __m512i *b)
{
    const __m512i sum = _mm512_add_epi16(*a, *b);

    *b = _mm512_sub_epi16(*a, *b);
    *a = sum;
}

/* Exchange registers with lanes, so that the next stage is between a and b.  Position bits as
 * numbered for H code below: `near` turns (a|b, 1, 2) to (2, a|b, 1), `far` (a|b, 3, 4) to (3, 4,
 * a|b). */
INLINE void exchange_near(__m512i *a, __m512i *b)
{
    const __m512i lo = _mm512_unpacklo_epi32(*a, *b);

    *b = _mm512_unpackhi_epi32(*a, *b);
    *a = lo;
}

INLINE void exchange_far(__m512i *a, __m512i *b)
{
    const __m512i even = _mm512_shuffle_i64x2(*a, *b, 0x88);

    *b = _mm512_shuffle_i64x2(*a, *b, 0xDD);
    *a = even;
}

/* H code, in the pairs of bfloat16, as integers: |sums| <= 2^14, so 16 bits do, in any
 * order of stages.  What index bit each position holds:
 *                      byte   word's lane      registers
 *                              0  1 2 3 4
 *   value                2     0  3 1 4 5      6
 *   maddubs                    0  3 1 4 5      2 6      stage 2; then 6
 *   near                       0  2 3 4 5      1 6      stage 1
 *   near                       0  1 2 4 5      3 6      stage 3
 *   far                        0  1 2 5 3      4 6      stage 4
 *   far                        0  1 2 3 4      5 6      stage 5
 *   madd                          1 2 3 4    0 5 6      stage 0 */
INLINE void unrotate(const constants *c, const __m512i value[2], __m512i y[8])
{
    __m512i r[4];

    for (int h = 0; h < 2; h++) {
        r[2 * h] = _mm512_maddubs_epi16(c->plus_bytes, value[h]);
        /* Its first operand is unsigned: 128 + code, and the offsets cancel. */
        r[2 * h + 1] = _mm512_maddubs_epi16(_mm512_xor_si512(value[h], c->sign_bytes), c->plus_minus_bytes);
    }
    butterfly16(&r[0], &r[2]);
    butterfly16(&r[1], &r[3]);
    for (int h = 0; h < 4; h += 2) {
        exchange_near(&r[h], &r[h + 1]);
        butterfly16(&r[h], &r[h + 1]);
        exchange_near(&r[h], &r[h + 1]);
        butterfly16(&r[h], &r[h + 1]);
        exchange_far(&r[h], &r[h + 1]);
        butterfly16(&r[h], &r[h + 1]);
        exchange_far(&r[h], &r[h + 1]);
        butterfly16(&r[h], &r[h + 1]);
    }
    for (int k = 0; k < 4; k++) {
        y[2 * k] = _mm512_madd_epi16(r[k], c->plus_words);
        y[2 * k + 1] = _mm512_madd_epi16(r[k], c->plus_minus_words);
    }
}

#endif
