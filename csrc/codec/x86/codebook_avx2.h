/* codebook_avx2.h: the codes of the rotated formats for AVX2: integers t to bytes in memory, and
 * bytes to integers in the order that unrotate() takes. */
#ifndef GRADCKPT_CODEBOOK_AVX2_H
#define GRADCKPT_CODEBOOK_AVX2_H

#include "codec/x86/avx2.h"
#include "codec/x86/codebook_tables.h"

#define TABLE_OF(...) _mm256_broadcastsi128_si256(_mm_setr_epi8(__VA_ARGS__))

/* ---- encode ----
 *
 * t[i] holds the integers of values 32 i .. 32 i + 31 as two packs leave them: in its first
 * half 0..7 and 16..23 of these, in the second 8..15 and 24..31. */

INLINE __m256i every_second_byte(int even, int odd)
{
    return _mm256_set1_epi16((short)((odd & 0xFF) << 8 | (even & 0xFF)));
}

/* The nibbles of `high`, in the upper halves of 2 x 32 bytes, to 32 bytes in order. */
INLINE __m256i packed_nibbles(__m256i a, __m256i b)
{
    const __m256i weights = every_second_byte(1, 16);
    const __m256i even_odd = _mm256_packus_epi16(_mm256_srli_epi16(_mm256_maddubs_epi16(a, weights), 4),
                                                 _mm256_srli_epi16(_mm256_maddubs_epi16(b, weights), 4));
    return _mm256_permutevar8x32_epi32(even_odd, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* 32 codes in the upper halves of bytes. */
INLINE __m256i int4_codes(__m256i t)
{
    const __m256i offsets = TABLE_OF(GCK_INT4_OFFSETS);
    const __m256i abs = _mm256_abs_epi8(t);
    const __m256i h = _mm256_and_si256(_mm256_srli_epi16(abs, 3), _mm256_set1_epi8(15));
    const __m256i index = _mm256_add_epi8(abs, _mm256_shuffle_epi8(offsets, h));
    const __m256i below = _mm256_and_si256(_mm256_sub_epi8(t, every_second_byte(0, 1)), _mm256_set1_epi8(-128));
    return _mm256_and_si256(_mm256_or_si256(index, below), _mm256_set1_epi8((char)0xF0));
}

INLINE void pack_int4(const __m256i t[4], uint8_t *codes, int stream)
{
    for (int i = 0; i < 4; i += 2) {
        store(codes + 16 * i, packed_nibbles(int4_codes(t[i]), int4_codes(t[i + 1])), stream);
    }
}

/* 32 codes in bytes. */
INLINE __m256i int6_codes(__m256i t, int uniform)
{
    const __m256i abs = _mm256_abs_epi8(t);
    const __m256i quarter = _mm256_and_si256(_mm256_srli_epi16(abs, 2), _mm256_set1_epi8(63));
    __m256i index = quarter;
    if (!uniform) {                      /* avg: (a + b + 1) >> 1 */
        const __m256i fine = _mm256_subs_epu8(_mm256_avg_epu8(abs, _mm256_setzero_si256()), _mm256_set1_epi8(1));
        const __m256i middle = _mm256_add_epi8(quarter, _mm256_set1_epi8(4));
        const __m256i coarse = _mm256_avg_epu8(quarter, _mm256_set1_epi8(31));
        index = _mm256_min_epu8(_mm256_min_epu8(fine, middle), coarse);
    }
    const __m256i below = _mm256_cmpgt_epi8(every_second_byte(0, 1), t);
    return _mm256_or_si256(index, _mm256_and_si256(below, _mm256_set1_epi8(32)));
}

/* The upper two bits of 4 x 32 codes, in order. */
INLINE __m256i packed_upper(const __m256i code[4])
{
    __m256i four[4];
    for (int i = 0; i < 4; i++) {
        const __m256i upper = _mm256_and_si256(code[i], _mm256_set1_epi8(0x30));
        const __m256i two = _mm256_maddubs_epi16(upper, every_second_byte(1, 4));
        four[i] = _mm256_madd_epi16(two, _mm256_set1_epi32(1 | 16 << 16));          /* 16 x the byte */
    }
    const __m256i a = _mm256_srli_epi16(_mm256_packus_epi32(four[0], four[1]), 4);
    const __m256i b = _mm256_srli_epi16(_mm256_packus_epi32(four[2], four[3]), 4);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
    return _mm256_shuffle_epi8(halves, _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)));
}

/* The lower halves of 32 bytes, in the upper ones. */
INLINE __m256i raised(__m256i code) { return _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi8(15)), 4); }

INLINE void put_int6(const __m256i code[4], uint8_t *codes, int stream)
{
    store(codes + 64, packed_upper(code), stream);
    store(codes, packed_nibbles(raised(code[0]), raised(code[1])), stream);
    store(codes + 32, packed_nibbles(raised(code[2]), raised(code[3])), stream);
}

INLINE void pack_int6(const __m256i t[4], int uniform, uint8_t *codes, int stream)
{
    __m256i code[4];

    for (int i = 0; i < 4; i++) {
        code[i] = int6_codes(t[i], uniform);
    }
    put_int6(code, codes, stream);
}

/* ---- decode ----
 *
 * Registers of 32 signed bytes, their places as unrotate() wants them.  A level is L + 1/2:
 * the bytes are L, or -1 - L = ~L below zero, and the halves are added by level_halves(). */

INLINE void int8_values(const uint8_t *codes, __m256i value[4])
{
    const __m256i places = TABLE_OF(0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15);

    for (int i = 0; i < 4; i++) {
        value[i] = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)codes + i), places);
    }
}

/* Values 2 p, 2 p + 1 for byte p of 32, with bits 1, 2, 3, 4 of the value at 2, 0, 1, 3 of its
 * place.  Of value[0], value[1] bit 4 is 0 and 1, bit 5 is in their halves. */
INLINE void interleaved(__m256i even, __m256i odd, __m256i value[2])
{
    value[0] = _mm256_unpacklo_epi16(even, odd);
    value[1] = _mm256_unpackhi_epi16(even, odd);
}

/* Bytes 32 i .. 32 i + 31 of nibbles, in these places. */
INLINE void nibbles(const uint8_t *codes, int i, __m256i *even, __m256i *odd)
{
    const __m256i places = TABLE_OF(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m256i both = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)codes + i), places);
    *even = _mm256_and_si256(both, _mm256_set1_epi8(15));
    *odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
}

INLINE void int4_values(const uint8_t *codes, __m256i value[4])
{
    const __m256i levels = TABLE_OF(GCK_INT4_LEVELS);

    for (int i = 0; i < 2; i++) {
        __m256i even, odd;
        nibbles(codes, i, &even, &odd);
        interleaved(_mm256_shuffle_epi8(levels, even), _mm256_shuffle_epi8(levels, odd), value + 2 * i);
    }
}

/* The levels of int6: indices 0..15, and 16..31. */
typedef struct {
    __m256i low, high;
} int6_levels;

INLINE int6_levels int6_levels_of(int uniform)
{
    return uniform ? (int6_levels){TABLE_OF(GCK_UNIFORM_LOW), TABLE_OF(GCK_UNIFORM_HIGH)}
                   : (int6_levels){TABLE_OF(GCK_INT6_LOW), TABLE_OF(GCK_INT6_HIGH)};
}

/* Lower four bits -> value; bit 7 of a byte of `fifth`: bit 4 of the index; of `sign`: below
 * zero. */
INLINE __m256i int6_value(int6_levels levels, __m256i low, __m256i fifth, __m256i sign)
{
    const __m256i level = _mm256_blendv_epi8(_mm256_shuffle_epi8(levels.low, low),
                                             _mm256_shuffle_epi8(levels.high, low), fifth);
    return _mm256_xor_si256(level, _mm256_cmpgt_epi8(_mm256_setzero_si256(), sign));
}

/* Move bit `bit` of the bytes in even 32-bit lanes, and bit + 4 of those in odd ones, to bit 7.
 * Multiplication does it, because shuffles and shifts share two units, which are busy. */
INLINE __m256i to_top(__m256i bytes, int bit)
{
    const int even = (128 >> bit) * 0x10001, odd = (8 >> bit) * 0x10001;
    return _mm256_mullo_epi16(bytes, _mm256_setr_epi32(even, odd, even, odd, even, odd, even, odd));
}

INLINE void int6_values(const uint8_t *codes, int uniform, __m256i value[4])
{
    const __m256i places = _mm256_setr_epi8(0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7,
                                            8, 9, 10, 11, 8, 9, 10, 11, 12, 13, 14, 15, 12, 13, 14, 15);
    const int6_levels levels = int6_levels_of(uniform);

    for (int i = 0; i < 2; i++) {
        const __m128i half = _mm_loadu_si128((const __m128i *)(codes + 64) + i);
        const __m256i upper = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half), places);
        __m256i even, odd;
        nibbles(codes, i, &even, &odd);
        /* Values with index bit 1 = 0 have bits 0..3, in even lanes; the others bits 4..7, in odd
         * ones. */
        even = int6_value(levels, even, to_top(upper, 0), to_top(upper, 1));
        odd = int6_value(levels, odd, to_top(upper, 2), to_top(upper, 3));
        interleaved(even, odd, value + 2 * i);
    }
}

#endif
