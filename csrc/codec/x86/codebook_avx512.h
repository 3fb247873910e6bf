/* codebook_avx512.h: the codes of the rotated formats for AVX-512: integers t to bytes in memory,
 * and bytes to integers in the order that unrotate() takes. */
#ifndef GRADCKPT_CODEBOOK_AVX512_H
#define GRADCKPT_CODEBOOK_AVX512_H

#include "codec/x86/avx512.h"
#include "codec/x86/codebook_tables.h"

/* ---- encode: t0, t1 are 2 x 64 values in order ---- */

TABLE uint8_t int4_offsets[64] = {GCK_FOUR_TIMES(GCK_INT4_OFFSETS)};
TABLE uint64_t order_of_packs[8] = {0, 2, 4, 6, 1, 3, 5, 7};

/* Nibbles in the upper halves of 2 x 64 bytes, to 64 bytes. */
INLINE __m512i packed_nibbles(const constants *c, __m512i a, __m512i b)
{
    const __m512i low = _mm512_srli_epi16(_mm512_maddubs_epi16(a, c->weights_1_16), 4);
    const __m512i high = _mm512_srli_epi16(_mm512_maddubs_epi16(b, c->weights_1_16), 4);

    return _mm512_permutexvar_epi64(_mm512_loadu_si512(order_of_packs), _mm512_packus_epi16(low, high));
}

/* Codes in the upper halves of the bytes. */
INLINE __m512i int4_codes(const constants *c, __m512i t)
{
    const __m512i abs = _mm512_abs_epi8(t);
    const __m512i h = _mm512_and_si512(_mm512_srli_epi16(abs, 3), c->low_nibble);
    const __m512i index = _mm512_add_epi8(abs, _mm512_shuffle_epi8(_mm512_loadu_si512(int4_offsets), h));
    const __m512i below = _mm512_sub_epi8(t, c->odd_bytes);                       /* its sign */

    return _mm512_and_si512(blend_one(below, c->sign_bytes, index), c->high_nibble);
}

INLINE void pack_int4(const constants *c, __m512i t0, __m512i t1, uint8_t *codes, int stream)
{
    put(codes, packed_nibbles(c, int4_codes(c, t0), int4_codes(c, t1)), stream);
}

INLINE __m512i int6_codes(const constants *c, __m512i t, int uniform)
{
    const __m512i abs = _mm512_abs_epi8(t);
    const __m512i quarter = _mm512_and_si512(_mm512_srli_epi16(abs, 2), c->low_six);
    __m512i index = quarter;

    if (!uniform) {                                /* avg: (a + b + 1) >> 1 */
        const __m512i fine = _mm512_subs_epu8(_mm512_avg_epu8(abs, _mm512_setzero_si512()), c->plus_bytes);
        const __m512i middle = _mm512_add_epi8(quarter, all32(0x04040404u));
        const __m512i coarse = _mm512_avg_epu8(quarter, all32(0x1F1F1F1Fu));
        index = _mm512_min_epu8(_mm512_min_epu8(fine, middle), coarse);
    }
    const __mmask64 below = _mm512_cmpgt_epi8_mask(c->odd_bytes, t);
    return _mm512_mask_add_epi8(index, below, index, all32(0x20202020u));
}

/* The upper two bits of 64 codes, four to a 32-bit lane, times 16. */
INLINE __m512i upper_of_four(const constants *c, __m512i code)
{
    const __m512i two = _mm512_maddubs_epi16(_mm512_and_si512(code, all32(0x30303030u)), c->weights_1_4);

    return _mm512_madd_epi16(two, c->words_1_16);
}

TABLE uint32_t order_of_upper[16] = {0, 2, 4, 6, 1, 3, 5, 7};

/* The lower halves of 64 bytes, in the upper ones. */
INLINE __m512i raised(const constants *c, __m512i code)
{
    return _mm512_slli_epi16(_mm512_and_si512(code, c->low_nibble), 4);
}

/* 2 x 64 codes. */
INLINE void put_int6(const constants *c, __m512i a, __m512i b, uint8_t *codes, int stream)
{
    const __m512i nibbles = packed_nibbles(c, raised(c, a), raised(c, b));
    const __m512i upper = _mm512_srli_epi16(_mm512_packus_epi32(upper_of_four(c, a), upper_of_four(c, b)), 4);
    const __m512i bytes = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(upper));
    const __m512i ordered = _mm512_permutexvar_epi32(_mm512_loadu_si512(order_of_upper), bytes);

    put_half(codes, _mm512_castsi512_si256(nibbles), stream);
    put_half(codes + 32, _mm512_extracti64x4_epi64(nibbles, 1), stream);
    put_half(codes + 64, _mm512_castsi512_si256(ordered), stream);
}

INLINE void pack_int6(const constants *c, __m512i t0, __m512i t1, int uniform, uint8_t *codes, int stream)
{
    put_int6(c, int6_codes(c, t0, uniform), int6_codes(c, t1, uniform), codes, stream);
}

/* ---- decode ----
 *
 * Two registers of 64 signed bytes, their places as unrotate() wants them.  A level is
 * L + 1/2: the bytes are L, or -1 - L = ~L below zero; unrotate() knows of the halves. */

#define LANE_OF_BYTES 0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15
TABLE uint8_t places_of_bytes[64] = {GCK_FOUR_TIMES(LANE_OF_BYTES)};
#undef LANE_OF_BYTES

INLINE void int8_values(const uint8_t *codes, __m512i value[2])
{
    for (int h = 0; h < 2; h++) {
        value[h] = _mm512_shuffle_epi8(_mm512_loadu_si512(codes + 64 * h), _mm512_loadu_si512(places_of_bytes));
    }
}

/* Byte p of 64 holds values 2 p, 2 p + 1.  Lanes: bits 4, 5 of the value; in a lane bits 2, 3,
 * 1, 6. */
#define LANE_OF_NIBBLES 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15
TABLE uint8_t places_of_nibbles[64] = {GCK_FOUR_TIMES(LANE_OF_NIBBLES)};
#undef LANE_OF_NIBBLES
TABLE uint64_t far_halves[8] = {0, 4, 1, 5, 2, 6, 3, 7};

INLINE void nibbles(const constants *c, const uint8_t *codes, __m512i *even, __m512i *odd)
{
    const __m512i far = _mm512_permutexvar_epi64(_mm512_loadu_si512(far_halves), _mm512_loadu_si512(codes));
    const __m512i both = _mm512_shuffle_epi8(far, _mm512_loadu_si512(places_of_nibbles));

    *even = _mm512_and_si512(both, c->low_nibble);
    *odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), c->low_nibble);
}

/* Bits 2, 0, 3, 1 in a lane; bit 6 is 0 and 1. */
INLINE void interleaved(__m512i even, __m512i odd, __m512i value[2])
{
    value[0] = _mm512_unpacklo_epi16(even, odd);
    value[1] = _mm512_unpackhi_epi16(even, odd);
}

TABLE int8_t int4_levels[64] = {GCK_FOUR_TIMES(GCK_INT4_LEVELS)};

INLINE void int4_values(const constants *c, const uint8_t *codes, __m512i value[2])
{
    const __m512i levels = _mm512_loadu_si512(int4_levels);
    __m512i even, odd;

    nibbles(c, codes, &even, &odd);
    interleaved(_mm512_shuffle_epi8(levels, even), _mm512_shuffle_epi8(levels, odd), value);
}

/* By `uniform`, and by bit 4 of the index. */
TABLE int8_t int6_levels[2][2][64] = {
    {{GCK_FOUR_TIMES(GCK_INT6_LOW)}, {GCK_FOUR_TIMES(GCK_INT6_HIGH)}},
    {{GCK_FOUR_TIMES(GCK_UNIFORM_LOW)}, {GCK_FOUR_TIMES(GCK_UNIFORM_HIGH)}},
};

INLINE __m512i int6_value(const constants *c, int uniform, __m512i low, __mmask64 fifth, __mmask64 sign)
{
    const __m512i fine = _mm512_shuffle_epi8(_mm512_loadu_si512(int6_levels[uniform][0]), low);
    const __m512i level = _mm512_mask_shuffle_epi8(fine, fifth, _mm512_loadu_si512(int6_levels[uniform][1]), low);

    return _mm512_mask_sub_epi8(level, sign, c->ones, level);
}

TABLE uint32_t places_of_upper[16] = {0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7};

INLINE void int6_values(const constants *c, const uint8_t *codes, int uniform, __m512i value[2])
{
    const __m512i loaded = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(codes + 64)));
    const __m512i upper = _mm512_permutexvar_epi32(_mm512_loadu_si512(places_of_upper), loaded);
    __m512i even, odd;

    nibbles(c, codes, &even, &odd);
    /* Bits 0..3 belong to values with bit 1 = 0, bits 4..7 to the others: every second 32-bit
     * lane. */
    even = int6_value(c, uniform, even, _mm512_test_epi8_mask(upper, c->fifth_even),
                      _mm512_test_epi8_mask(upper, c->sign_even));
    odd = int6_value(c, uniform, odd, _mm512_test_epi8_mask(upper, c->fifth_odd),
                     _mm512_test_epi8_mask(upper, c->sign_odd));
    interleaved(even, odd, value);
}

#endif
