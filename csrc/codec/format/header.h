/* header.h: bits of a group that is not ordinary, in what its codes can spare.
 *
 * group.h draws the headers. */
#ifndef GRADCKPT_HEADER_H
#define GRADCKPT_HEADER_H

#include "codec/format/codebook.h"

enum { GCK_HEADER_BITS = 192 };

typedef struct {
    uint64_t word[GCK_HEADER_BITS / 64];
    int      at;                 /* the next bit to put or take */
} gck_header;

GCK_FN void gck_put(gck_header *h, uint32_t value, int bits)
{
    const int w = h->at / 64, shift = h->at % 64;

    h->word[w] |= (uint64_t)value << shift;
    if (shift + bits > 64) {
        h->word[w + 1] |= (uint64_t)value >> (64 - shift);
    }
    h->at += bits;
}

GCK_FN uint32_t gck_take(gck_header *h, int bits)
{
    const int w = h->at / 64, shift = h->at % 64;
    uint64_t value = h->word[w] >> shift;

    if (shift + bits > 64) {
        value |= h->word[w + 1] << (64 - shift);
    }
    h->at += bits;
    return (uint32_t)(value & (((uint64_t)1 << bits) - 1));
}

GCK_FN uint32_t gck_header_bit(const gck_header *h, int i) { return (uint32_t)(h->word[i / 64] >> (i % 64)) & 1u; }

GCK_FN void gck_set_header_bit(gck_header *h, int i, uint32_t bit) { h->word[i / 64] |= (uint64_t)bit << (i % 64); }

/* ---- rotated groups: the lowest bits of codes ----
 *
 * Bit b of the header is bit b / 128 of code b % 128.  int4 has eight more bits, in front of these:
 * those of side[1] beside its mark. */

GCK_FN int gck_bits_beside(gck_format format) { return format == GCK_INT4 ? 8 : 0; }

/* How many of the lowest bits of code i hold a header of n bits; those of int4 beside the codes not
 * counted. */
GCK_FN int gck_stolen(int n, int i) { return (i < n) + (i + GCK_GROUP < n); }

/* Twice the value of code i in steps of y, the middle of the values that its `stolen` lowest bits
 * may have meant; for levels the second of four. */
GCK_HOT_FN int gck_coarse_value(gck_format format, uint8_t code, int stolen)
{
    const uint8_t below = (uint8_t)((1 << stolen) - 1), first = (uint8_t)(code & ~below);

    if (!gck_has_levels(format)) {
        return 2 * (int8_t)first + below;
    }
    const int value = gck_level_value(format, 0, (uint8_t)(first | (stolen > 1)));
    return stolen == 1 ? (value + gck_level_value(format, 0, (uint8_t)(first | 1))) / 2 : value;
}

/* The error of the codes with a header of n bits, in 128ths of its square without. */
GCK_FN int gck_coarse_noise(gck_format format, int n)
{
    const int stolen = n - gck_bits_beside(format) > 0 ? n - gck_bits_beside(format) : 0;

    return GCK_GROUP + 3 * stolen + (stolen > GCK_GROUP ? 9 * (stolen - GCK_GROUP) : 0);
}

/* ---- groups that are not rotated: codes of fewer values ----
 *
 * Four codes below Q are one number, little-endian, of four times the bits of a code; the uppermost
 * 0, 1 or 2 bits of the 32 numbers hold the header: bits 0, 1, ... or 0 and 1, 2 and 3, ... */

/* Q: the largest number whose fourth power leaves `spare` of the bits. */
GCK_FN uint32_t gck_alphabet(gck_format format, int spare)
{
    const int bits = gck_code_bits(format);

    return spare == 0 ? 1u << bits : spare == 1 ? (bits == 8 ? 215u : bits == 6 ? 53u : 13u)
                                                : (bits == 8 ? 181u : bits == 6 ? 45u : 11u);
}

/* Divided by Q: by constants, which compilers turn into products. */
GCK_FN uint32_t gck_over_alphabet(gck_format format, int spare, uint32_t four)
{
    return spare == 0 ? four / gck_alphabet(format, 0)
         : spare == 1 ? four / gck_alphabet(format, 1) : four / gck_alphabet(format, 2);
}

GCK_HOT_FN uint32_t gck_join_four(gck_format format, int spare, const uint8_t code[4], uint32_t header)
{
    const uint32_t q = gck_alphabet(format, spare);
    const uint32_t four = ((code[3] * q + code[2]) * q + code[1]) * q + code[0];

    return spare > 0 ? four | header << (4 * gck_code_bits(format) - spare) : four;
}

/* Returns the header's bits. */
GCK_HOT_FN uint32_t gck_split_four(gck_format format, int spare, uint32_t four, uint8_t code[4])
{
    const uint32_t q = gck_alphabet(format, spare);
    const int bits = 4 * gck_code_bits(format);
    const uint32_t header = spare > 0 ? four >> (bits - spare) : 0u;

    four = spare > 0 ? four & ((1u << (bits - spare)) - 1u) : four;
    for (int k = 0; k < 4; k++) {
        const uint32_t over = gck_over_alphabet(format, spare, four);
        code[k] = (uint8_t)(four - over * q);
        four = over;
    }
    return header;
}

GCK_HOT_FN void gck_put_four(gck_format format, int spare, const uint8_t code[4], uint32_t header, int number,
                             uint8_t *codes)
{
    const uint32_t four = gck_join_four(format, spare, code, header);
    const int bytes = gck_code_bits(format) / 2;

    for (int b = 0; b < bytes; b++) {
        codes[number * bytes + b] = (uint8_t)(four >> (8 * b));
    }
}

GCK_FN uint32_t gck_number_of(gck_format format, const uint8_t *codes, int number)
{
    const int bytes = gck_code_bits(format) / 2;
    uint32_t four = 0;

    for (int b = 0; b < bytes; b++) {
        four |= (uint32_t)codes[number * bytes + b] << (8 * b);
    }
    return four;
}

#endif
