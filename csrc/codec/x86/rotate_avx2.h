/* rotate_avx2.h: H (d o x) in float32 and H code in integers, for AVX2. */
#ifndef GRADCKPT_ROTATE_AVX2_H
#define GRADCKPT_ROTATE_AVX2_H

#include "codec/x86/avx2.h"

/* The Hadamard signs as the sign bits of 128 16-bit values, for each pattern. */
#define SIGN(word, bit) (((word) >> (bit) & 1u) << 15)
#define SIGNS_4(word, bit) SIGN(word, bit), SIGN(word, bit + 1), SIGN(word, bit + 2), SIGN(word, bit + 3)
#define SIGNS_16(word, bit) SIGNS_4(word, bit), SIGNS_4(word, bit + 4), SIGNS_4(word, bit + 8), SIGNS_4(word, bit + 12)
#define SIGNS_32(word) SIGNS_16(word, 0), SIGNS_16(word, 16)
#define SIGNS_128(a, b, c, d) {SIGNS_32(a), SIGNS_32(b), SIGNS_32(c), SIGNS_32(d)},
static const _Alignas(32) uint16_t signs[GCK_NPATTERNS][GCK_GROUP] = {GCK_SIGN_PATTERNS(SIGNS_128)};

/* Of group `index`. */
INLINE const __m256i *signs_of(int64_t index) { return (const __m256i *)signs[gck_pattern(index)]; }

/* ---- float32, in the order of gck_hadamard() ---- */

/* A stage between registers `h` apart. */
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

/* ---- integers ---- */

INLINE void butterfly(__m256i *a, __m256i *b)
{
    const __m256i sum = _mm256_add_epi16(*a, *b);
    *b = _mm256_sub_epi16(*a, *b);
    *a = sum;
}

/* Word's place in its half of 8: bits (0, 1, 2); registers a, b: bit r.  Moves them to
 * (0, r, 1); bit 2 is now between a and b. */
INLINE void turn(__m256i *a, __m256i *b)
{
    const __m256i low = _mm256_unpacklo_epi32(*a, *b);
    *b = _mm256_unpackhi_epi32(*a, *b);
    *a = low;
}

/* H code, except for index bit 0.  Integers of 16 bits hold every sum (128 x 128 < 2^15), so the
 * order of the stages is free.  The table shows which index bit each bit of a place holds, the
 * registers' last, X being 4 or 5:
 *                        byte   word in half, half   registers
 *     code[4]               2       0 3 1      X      the others of 4, 5, 6
 *     maddubs                       0 3 1      X      2           stage 2
 *     turn                          0 2 3      X      1           stage 1
 *     turn                          0 1 2      X      3           stage 3
 *     permute                       0 1 2      3      X           stage X; then the others
 * w[2 i], w[2 i + 1] come from code[i]. */
INLINE void unrotate(const __m256i code[4], __m256i w[8])
{
    const __m256i plus = _mm256_set1_epi8(1), plus_minus = _mm256_set1_epi16((short)0xFF01);
    const __m256i offset = _mm256_set1_epi8(-128);

    for (int i = 0; i < 4; i++) {
        /* The first operand of maddubs is unsigned: 128 + code, and the offsets cancel. */
        __m256i a = _mm256_maddubs_epi16(plus, code[i]);
        __m256i b = _mm256_maddubs_epi16(_mm256_xor_si256(code[i], offset), plus_minus);
        turn(&a, &b);
        butterfly(&a, &b);
        turn(&a, &b);
        butterfly(&a, &b);
        w[2 * i] = _mm256_permute2x128_si256(a, b, 0x20);
        w[2 * i + 1] = _mm256_permute2x128_si256(a, b, 0x31);
        butterfly(&w[2 * i], &w[2 * i + 1]);
    }
    for (int k = 0; k < 2; k++) {
        butterfly(&w[k], &w[k + 2]);
        butterfly(&w[k + 4], &w[k + 6]);
    }
    for (int k = 0; k < 4; k++) {
        butterfly(&w[k], &w[k + 4]);
    }
}

#endif
