/* codebook.h: the levels of int6 and int4.
 *
 * They round y to an integer t, |t| <= 127, as int8 does, and then t to the
 * nearest of 64 or 16 levels, which lie at +-(L + 1/2):
 *     int6            widths of the cells 2, 4, 8: fine where a Gaussian has its values
 *     int6, uniform   all cells 4 wide: for groups with an outlier, whose y lie at +-outlier
 *     int4            the best 8 for Gaussian y of which the largest is the top (Lloyd-Max)
 * docs/codecs.md says how they were chosen. */
#ifndef GRADCKPT_CODEBOOK_H
#define GRADCKPT_CODEBOOK_H

#include "codec/format/quantize.h"

/* The index of the level of |t|. */
GCK_FN int gck_index(gck_format format, int uniform, int m)
{
    if (format == GCK_INT4) {
        return (m >= 12) + (m >= 24) + (m >= 36) + (m >= 49) + (m >= 64) + (m >= 81) + (m >= 103);
    }
    if (uniform) {
        return m >> 2;
    }
    const int fine = m > 0 ? (m - 1) >> 1 : 0, middle = (m >> 2) + 4, coarse = (m >> 3) + 16;
    return fine < middle ? fine : middle < coarse ? middle : coarse;
}

/* The level L of an index. */
GCK_FN int gck_level(gck_format format, int uniform, int index)
{
    if (format == GCK_INT4) {
        return (int)((index < 4 ? 0x291D1105u : 0x73594737u) >> (8 * (index & 3)) & 0xFFu);
    }
    if (uniform) {
        return 4 * index + 1;
    }
    const int fine = 2 * index + 1, middle = 4 * index - 15, coarse = 8 * index - 125;
    return fine > middle ? fine : middle > coarse ? middle : coarse;
}

GCK_FN int gck_sign_bit(gck_format format) { return 1 << (gck_code_bits(format) - 1); }

/* The code of t, value i of its group.  A zero belongs to both smallest levels: for even i it takes
 * the one above, for odd i the one below. */
GCK_FN uint8_t gck_level_code(gck_format format, int uniform, int t, int i)
{
    return (uint8_t)(gck_index(format, uniform, t < 0 ? -t : t) | (t < (i & 1) ? gck_sign_bit(format) : 0));
}

/* Twice the level of a code: an odd integer. */
GCK_FN int gck_level_value(gck_format format, int uniform, uint8_t code)
{
    const int sign = gck_sign_bit(format);
    const int value = 2 * gck_level(format, uniform, code & (sign - 1)) + 1;

    return code & sign ? -value : value;
}

/* Stochastic rounding: the level above p = f32(y * inv) when f32(p + u gap) reaches it, else the
 * one below; gap: the distance of the two. */
GCK_FN uint8_t gck_level_code_noisy(gck_format format, int uniform, float y, float inv, int noise)
{
    const int sign = gck_sign_bit(format);
    const float p = y * inv, u = gck_uniform(noise);
    const float first = (float)gck_level(format, uniform, 0) + 0.5f;
    const int m = (int)floorf(gck_abs(p) - 0.5f);        /* L <= m: a level at most |p| */
    const int near = m < 0 ? 0 : gck_index(format, uniform, m);
    const int below = near - (gck_level(format, uniform, near) > m);

    if (below < 0) {                                     /* between the two smallest */
        return (uint8_t)(p + 2 * first * u >= first ? 0 : sign);
    }
    const int above = below + 1 < sign ? below + 1 : below;
    const float a = (float)gck_level(format, uniform, below) + 0.5f;
    const float b = (float)gck_level(format, uniform, above) + 0.5f;
    if (p > 0.f) {
        return (uint8_t)(p + (b - a) * u >= b ? above : below);
    }
    return (uint8_t)((p + (b - a) * u >= -a ? below : above) | sign);
}

/* The mean square of a cell's width, in steps of y: that of Gaussian y. */
GCK_FN float gck_cell_noise(gck_format format) { return format == GCK_INT4 ? 290.f : format == GCK_INT6 ? 16.f : 1.f; }

/* The codes of y, whose amax gives the step; uniform: int6's levels. */
GCK_HOT_FN void gck_codes_of(gck_format format, const float *y, uint32_t stored, int uniform, float inv,
                              const uint16_t *noise, uint8_t *code)
{
    if (stored == 0) {
        memset(code, 0, GCK_GROUP);
    } else if (noise == NULL) {
        for (int i = 0; i < GCK_GROUP; i++) {
            const int t = gck_round_product(y[i], inv);
            code[i] = gck_has_levels(format) ? gck_level_code(format, uniform, t, i) : (uint8_t)t;
        }
    } else {
        for (int i = 0; i < GCK_GROUP; i++) {
            code[i] = gck_has_levels(format) ? gck_level_code_noisy(format, uniform, y[i], inv, noise[i])
                                             : gck_code(format, 0, y[i], inv, noise[i]);
        }
    }
}

#endif
