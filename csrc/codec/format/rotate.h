/* rotate.h: the sign-randomised Hadamard transform of a group, and back.
 *
 * y = H (d o x), H the 128-point Hadamard matrix (natural order, entries +-1), d the signs of the
 * group's pattern. */
#ifndef GRADCKPT_ROTATE_H
#define GRADCKPT_ROTATE_H

#include "codec/format/float_bits.h"

/* Hadamard signs, 16 patterns: bit i % 32 of word i / 32 set means value i is negated.  They are
 * the first 2048 bits of the fraction of pi, as nothing-up-my-sleeve numbers. */
#define GCK_SIGN_PATTERNS(PATTERN) \
    PATTERN(0x243F6A88u, 0x85A308D3u, 0x13198A2Eu, 0x03707344u) \
    PATTERN(0xA4093822u, 0x299F31D0u, 0x082EFA98u, 0xEC4E6C89u) \
    PATTERN(0x452821E6u, 0x38D01377u, 0xBE5466CFu, 0x34E90C6Cu) \
    PATTERN(0xC0AC29B7u, 0xC97C50DDu, 0x3F84D5B5u, 0xB5470917u) \
    PATTERN(0x9216D5D9u, 0x8979FB1Bu, 0xD1310BA6u, 0x98DFB5ACu) \
    PATTERN(0x2FFD72DBu, 0xD01ADFB7u, 0xB8E1AFEDu, 0x6A267E96u) \
    PATTERN(0xBA7C9045u, 0xF12C7F99u, 0x24A19947u, 0xB3916CF7u) \
    PATTERN(0x0801F2E2u, 0x858EFC16u, 0x636920D8u, 0x71574E69u) \
    PATTERN(0xA458FEA3u, 0xF4933D7Eu, 0x0D95748Fu, 0x728EB658u) \
    PATTERN(0x718BCD58u, 0x82154AEEu, 0x7B54A41Du, 0xC25A59B5u) \
    PATTERN(0x9C30D539u, 0x2AF26013u, 0xC5D1B023u, 0x286085F0u) \
    PATTERN(0xCA417918u, 0xB8DB38EFu, 0x8E79DCB0u, 0x603A180Eu) \
    PATTERN(0x6C9E0E8Bu, 0xB01E8A3Eu, 0xD71577C1u, 0xBD314B27u) \
    PATTERN(0x78AF2FDAu, 0x55605C60u, 0xE65525F3u, 0xAA55AB94u) \
    PATTERN(0x57489862u, 0x63E81440u, 0x55CA396Au, 0x2AAB10B6u) \
    PATTERN(0xB4CC5C34u, 0x1141E8CEu, 0xA15486AFu, 0x7C72E993u)
enum { GCK_NPATTERNS = 16 };

#define GCK_FOUR_WORDS(a, b, c, d) {a, b, c, d},
GCK_TABLE uint32_t gck_sign_words[GCK_NPATTERNS][4] = {GCK_SIGN_PATTERNS(GCK_FOUR_WORDS)};

/* The pattern of a group.  Patterns differ from token to token at any width, so that equal vectors
 * (the same word's embedding) have errors that do not add up. */
GCK_FN int gck_pattern(int64_t group) { return (int)((uint32_t)group * 0x9E3779B1u >> 28); }

/* Transform in place.  The stages run in the order of the index bits 0, 1, ... 6, which is part of
 * the format, because float addition is not associative; integers may take any. */
#define GCK_DEFINE_HADAMARD(name, type)                                                                     \
    GCK_FN void name(type *y)                                                                               \
    {                                                                                                       \
        for (int i = 0; i < GCK_GROUP; i += 8) {   /* bits 0, 1, 2: written so that compilers use vectors */ \
            type a[8], b[8];                                                                                \
            for (int j = 0; j < 8; j++) {                                                                   \
                a[j] = y[i + (j ^ 1)] + (j & 1 ? -y[i + j] : y[i + j]);                                     \
            }                                                                                               \
            for (int j = 0; j < 8; j++) {                                                                   \
                b[j] = a[j ^ 2] + (j & 2 ? -a[j] : a[j]);                                                   \
            }                                                                                               \
            for (int j = 0; j < 8; j++) {                                                                   \
                y[i + j] = b[j ^ 4] + (j & 4 ? -b[j] : b[j]);                                               \
            }                                                                                               \
        }                                                                                                   \
        for (int h = 8; h < GCK_GROUP; h *= 2) {                                                            \
            for (int i = 0; i < GCK_GROUP; i += 2 * h) {                                                    \
                for (int j = i; j < i + h; j++) {                                                           \
                    const type a = y[j], b = y[j + h];                                                      \
                    y[j] = a + b;                                                                           \
                    y[j + h] = a - b;                                                                       \
                }                                                                                           \
            }                                                                                               \
        }                                                                                                   \
    }
GCK_DEFINE_HADAMARD(gck_hadamard, float)
GCK_DEFINE_HADAMARD(gck_hadamard_of_integers, int32_t)

/* The values of a group, zeros for those that it lacks. */
GCK_FN void gck_load_group(const void *x, gck_dtype dtype, int count, float *v)
{
    for (int i = 0; i < count; i++) {
        v[i] = gck_load(x, dtype, i);
    }
    for (int i = count; i < GCK_GROUP; i++) {
        v[i] = 0.f;
    }
}

/* The largest |v| of n values; NaN is larger than any. */
GCK_FN float gck_largest_of(const float *v, int n)
{
    int32_t largest = 0;

    for (int i = 0; i < n; i++) {
        const int32_t bits = (int32_t)(gck_bits(v[i]) & 0x7FFFFFFFu);
        largest = bits > largest ? bits : largest;
    }
    return gck_float((uint32_t)largest);
}

/* d o y in place. */
GCK_FN void gck_negate(float *y, int pattern)
{
    for (int w = 0; w < GCK_GROUP / 32; w++) {
        const uint32_t word = gck_sign_words[pattern][w];
        for (int i = 0; i < 32; i++) {
            y[32 * w + i] = gck_float(gck_bits(y[32 * w + i]) ^ (word >> i & 1u) << 31);
        }
    }
}

/* y = H (d o x), x[at] taken as zero (at < 0: none); returns amax(y). */
GCK_SLOW_FN float gck_rotate(const float *x, int at, int pattern, float *y)
{
    memcpy(y, x, GCK_GROUP * sizeof *y);
    if (at >= 0) {
        y[at] = 0.f;
    }
    gck_negate(y, pattern);
    gck_hadamard(y);
    return gck_largest_of(y, GCK_GROUP);
}

/* v, or 0 if its sign is not that of `like`, which is not 0. */
GCK_FN float gck_of_sign(float v, float like) { return (v < 0.f) != (like < 0.f) ? 0.f : v; }

/* x' = d o (H value) * unit, and the mean, if it is not 0; value integers: |sums| <= 128 * 255, exact in
 * any order. */
GCK_FN void gck_unrotate(int32_t *value, float unit, float mean, int one_sign, int pattern, void *x, gck_dtype dtype,
                         int count)
{
    float v[GCK_GROUP];

    gck_hadamard_of_integers(value);
    for (int i = 0; i < GCK_GROUP; i++) {
        v[i] = (float)value[i] * unit;
    }
    gck_negate(v, pattern);
    for (int i = 0; i < count; i++) {
        const float moved = mean != 0.f ? v[i] + mean : v[i];
        gck_store(x, dtype, i, one_sign ? gck_of_sign(moved, mean) : moved);
    }
}

#endif
