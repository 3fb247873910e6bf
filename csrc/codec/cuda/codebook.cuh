/* codebook.cuh: codes and levels, four to a word: quantize.h's and codebook.h's functions, four
 * values.
 *
 * A byte holds a code, an integer t (|t| <= 127) or its size m = |t|; byte b of word w is
 * value 4 w + b of the lane.  Comparing bytes below 128: bit 7 of m + 128 - T is m >= T. */
#ifndef GRADCKPT_CODEBOOK_CUH
#define GRADCKPT_CODEBOOK_CUH

#include "codec/cuda/lane_group.cuh"

/* The same in all four bytes. */
GCK_LANE_FN constexpr uint32_t four(uint32_t byte) { return byte * 0x01010101u; }

GCK_LANE_FN uint32_t at_least(uint32_t m, uint32_t threshold) { return m + four(128u - threshold); }

GCK_LANE_FN uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

/* The lowest bytes of four words. */
GCK_LANE_FN uint32_t lowest_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

GCK_LANE_FN uint32_t highest_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}

/* ---- t to codes and codes to levels ---- */

/* Sizes to gck_index(). */
template <gck_format FORMAT>
GCK_LANE_FN uint32_t indices(uint32_t m, uint32_t uniform)
{
    if (FORMAT == GCK_INT4) {                      /* how many thresholds: their parities */
        const uint32_t over12 = at_least(m, 12), over24 = at_least(m, 24), over36 = at_least(m, 36);
        const uint32_t over49 = at_least(m, 49), over64 = at_least(m, 64), over81 = at_least(m, 81);
        const uint32_t one = over12 ^ over24 ^ over36 ^ over49 ^ over64 ^ over81 ^ at_least(m, 103);
        const uint32_t two = over24 ^ over49 ^ over81;
        return (one >> 7 & four(1)) | (two >> 6 & four(2)) | (over49 >> 5 & four(4));
    }
    const uint32_t some = at_least(m, 1) >> 7 & four(1);
    const uint32_t fine = (m - some) >> 1 & four(0x3F), middle = (m >> 2 & four(0x1F)) + four(4);
    const uint32_t coarse = (m >> 3 & four(0xF)) + four(16);
    const uint32_t index = choose(ptx_byte_signs(at_least(m, 96)), coarse,
                                  choose(ptx_byte_signs(at_least(m, 18)), middle, fine));
    return uniform ? middle - four(4) : index;
}

/* Integers to gck_level_code(): value 4 w + b is even in its group where b is. */
template <gck_format FORMAT>
GCK_LANE_FN uint32_t level_codes(uint32_t t, uint32_t uniform)
{
    const uint32_t negative = ptx_byte_signs(t);
    const uint32_t m = (t ^ negative) + (negative & four(1));
    const uint32_t below = ~((t ^ four(0x80)) - 0x01000100u) & four(0x80);   /* t < (i & 1) */

    return indices<FORMAT>(m, uniform) | below >> (FORMAT == GCK_INT4 ? 4 : 2);
}

/* Codes to bytes B with gck_level_value() = 2 B + 1: L for the upper levels, -L - 1 for
 * the lower ones. */
GCK_LANE_FN uint32_t int6_levels(uint32_t codes, uint32_t uniform)
{
    const uint32_t index = codes & four(0x1F);
    const uint32_t fine = 2 * index + four(1);
    const uint32_t middle = (4 * index + four(128 - 15)) & four(0x7F);         /* right from index 4 on */
    const uint32_t coarse = (8 * index + four(256 - 125 - 128)) & four(0x7F);  /* right from 16 on */
    const uint32_t level = choose(ptx_byte_signs(at_least(index, 28)), coarse,
                                  choose(ptx_byte_signs(at_least(index, 8)), middle, fine));

    return (uniform ? 4 * index + four(1) : level) ^ ptx_byte_signs(codes << 2);
}

/* Four nibbles at once select among the eight levels; `even` and `odd` hold the sign of a
 * nibble in bit 7 of a byte. */
GCK_LANE_FN void int4_levels(uint32_t nibbles, uint32_t &lower, uint32_t &upper)
{
    const uint32_t index = nibbles & 0x77777777u;
    const uint32_t even = ptx_byte_signs(nibbles << 4), odd = ptx_byte_signs(nibbles);

    lower = __byte_perm(0x291D1105u, 0x73594737u, index) ^ __byte_perm(even, odd, 0x5140);
    upper = __byte_perm(0x291D1105u, 0x73594737u, index >> 16) ^ __byte_perm(even, odd, 0x7362);
}

/* ---- codes in memory ---- */

/* Bytes to nibbles, eight to a word, and back. */
GCK_LANE_FN uint32_t to_nibbles(uint32_t lower, uint32_t upper)
{
    lower &= four(0xF), upper &= four(0xF);
    return __byte_perm(lower | lower >> 4, upper | upper >> 4, 0x6420);
}

GCK_LANE_FN void from_nibbles(uint32_t nibbles, uint32_t &lower, uint32_t &upper)
{
    const uint32_t even = nibbles & four(0xF), odd = nibbles >> 4 & four(0xF);

    lower = __byte_perm(even, odd, 0x5140);
    upper = __byte_perm(even, odd, 0x7362);
}

/* int4's codes, a byte each, to levels. */
GCK_LANE_FN void int4_levels_of_bytes(uint32_t (&codes)[4])
{
    int4_levels(to_nibbles(codes[0], codes[1]), codes[0], codes[1]);
    int4_levels(to_nibbles(codes[2], codes[3]), codes[2], codes[3]);
}

/* Bits 4 and 5 of four bytes, one after the other, as the highest byte; and one byte of
 * them to bits 4 and 5. */
GCK_LANE_FN uint32_t to_upper_bits(uint32_t codes) { return (codes >> 4 & four(3)) * 0x01041040u; }

GCK_LANE_FN uint32_t from_upper_bits(uint32_t byte)
{
    const uint32_t two = (byte | byte << 12) & 0x000F000Fu;

    return (two | two << 6) << 4 & four(0x30);
}

/* `keep`: else all codes are 0, as in a zero group, where levels would have signs. */
template <gck_format FORMAT>
GCK_LANE_FN void pack_codes(const uint32_t (&codes)[4], bool keep, share<FORMAT> &s)
{
    if constexpr (share<FORMAT>::WORDS == 4) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            s.word[w] = codes[w];
        }
    } else {
        s.word[0] = to_nibbles(codes[0], codes[1]);
        s.word[1] = to_nibbles(codes[2], codes[3]);
    }
    if constexpr (share<FORMAT>::WORDS == 3) {
        s.word[2] = highest_bytes(to_upper_bits(codes[0]), to_upper_bits(codes[1]), to_upper_bits(codes[2]),
                                  to_upper_bits(codes[3]));
    }
#pragma unroll
    for (int w = 0; w < share<FORMAT>::WORDS; w++) {
        s.word[w] = keep ? s.word[w] : 0u;
    }
}

template <gck_format FORMAT>
GCK_LANE_FN void unpack_codes(const share<FORMAT> &s, uint32_t (&codes)[4])
{
    if constexpr (share<FORMAT>::WORDS == 4) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            codes[w] = s.word[w];
        }
    } else {
        from_nibbles(s.word[0], codes[0], codes[1]);
        from_nibbles(s.word[1], codes[2], codes[3]);
    }
    if constexpr (share<FORMAT>::WORDS == 3) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            codes[w] |= from_upper_bits(s.word[2] >> (8 * w) & 0xFFu);
        }
    }
}

#endif
