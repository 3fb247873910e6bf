/* quantize.h: one value and its code: steps, rounding, packing.
 *
 * group.h draws the payload that holds these codes. */
#ifndef GRADCKPT_QUANTIZE_H
#define GRADCKPT_QUANTIZE_H

#include "codec/format/formats.h"
#include "codec/format/philox.h"

#define GCK_TINY       0x1p-80f    /* below: values are scaled by 2^64 first     */
#define GCK_LEAST      0x1p-110f   /* below: nothing beside the step of any group that is not tiny */
#define GCK_LARGE      0x1p13f     /* fp8, from here on: scaled by 2^-96 first   */

/* ---- steps ---- */

/* The largest magnitude of an integer code.  escaped: in form A, see group.h. */
GCK_FN int gck_top_code(gck_format format, int escaped)
{
    const int top = (1 << (gck_code_bits(format) - 1)) - 1;

    return gck_has_levels(format) && !escaped ? 127 : escaped ? top - 2 : top;
}

GCK_FN float gck_step_factor(gck_format format, int escaped, int noisy)
{
    return escaped ? gck_factor_escaped(format) : noisy ? gck_factor_noisy(format) : gck_factor(format);
}

GCK_FN int gck_dropped_bits(gck_format format, int escaped) { return escaped ? 16 : gck_ordinary_dropped_bits(format); }

/* amax (scaled by 2^k, so normal) -> stored: the upper half of a float32. */
GCK_FN uint32_t gck_stored(gck_format format, int escaped, int noisy, float amax)
{
    const uint32_t t = gck_bits(amax * gck_step_factor(format, escaped, noisy));
    const uint32_t below = (1u << gck_dropped_bits(format, escaped)) - 1u;

    return gck_is_fp8(format) && !noisy
        ? (t + 0x7FFFu + ((t >> 16) & 1u)) >> 16     /* nearest: the top code saturates  */
        : ((t + below) & ~below) >> 16;              /* up: no code is beyond the top    */
}

/* 1 / s, where s = stored * the unit. */
GCK_FN float gck_inverse(gck_format format, int escaped, uint32_t stored)
{
    return 1.0f / (gck_float(stored << 16) * (escaped ? gck_unit_escaped(format) : gck_unit(format)));
}

GCK_FN float gck_fp8_shift(gck_format format) { return format == GCK_E4M3 ? 0x1p-120f : 0x1p-112f; }

/* The multiplier that gck_code() takes. */
GCK_FN float gck_multiplier(gck_format format, int escaped, uint32_t stored)
{
    const float inv = gck_inverse(format, escaped, stored);

    return gck_is_fp8(format) ? inv * gck_fp8_shift(format) : inv;
}

/* The exponent k of the scaling 2^k that keeps every intermediate normal: for fp8, m is
 * 2^-120 / s and must not be subnormal for amax up to 1e30. */
GCK_FN int gck_prescale(gck_format format, float amax)
{
    return amax < GCK_TINY ? 64 : amax >= GCK_LARGE && gck_is_fp8(format) ? -96 : 0;
}

GCK_FN float gck_pow2(int k) { return k > 0 ? 0x1p64f : k < 0 ? 0x1p-96f : 1.f; }

/* ---- integers ---- */

/* The exact product, rounded to the nearest integer, ties to even. */
GCK_FN int gck_round_product(float x, float inv)
{
#ifdef __CUDA_ARCH__
    return __float_as_int(__fmaf_rn(x, inv, 12582912.f)) - 0x4B400000;
#elif defined(__FP_FAST_FMAF)
    return (int)gck_bits(fmaf(x, inv, 12582912.f)) - 0x4B400000;
#else
    return (int)lrint((double)x * (double)inv);
#endif
}

/* Stochastic rounding: p = f32(x * inv), then the integer below f32(p + u), at most `top` in
 * magnitude. */
GCK_FN int gck_round_noisy(float x, float inv, int noise, int top)
{
    const float p = x * inv;
    const int code = (int)floorf(p + gck_uniform(noise));

    return code > top ? top : code < -top ? -top : code;
}

/* ---- FP8 ---- */

/* OCP FP8 of x * m, where m = 2^-120 / s (E4M3) or 2^-112 / s (E5M2).  That moves the float32
 * exponent onto the FP8 exponent, subnormals onto subnormals, so that rounding is one addition. |x
 * / s| is at most slightly above the format's maximum. */
GCK_FN uint8_t gck_fp8_code(gck_format format, int escaped, float x, float m, int noise)
{
    const uint32_t u = gck_bits(x * m);
    const uint32_t abs = u & 0x7FFFFFFFu;
    const int drop = format == GCK_E4M3 ? 20 : 21;
    const uint32_t last = format == GCK_E5M2 ? 0x7Bu : escaped ? 0x7Cu : 0x7Eu;
    const uint32_t up = noise < 0 ? (1u << (drop - 1)) - 1u + ((abs >> drop) & 1u)
                                  : ((uint32_t)noise << (drop - 16)) + (1u << (drop - 17));
    uint32_t code = (abs + up) >> drop;

    code = noise >= 0 && code > last ? last : code;
    return (uint8_t)(code | (u >> 24 & 0x80u));
}

GCK_FN float gck_fp8_value(gck_format format, uint8_t code)
{
    return format == GCK_E4M3
        ? gck_float((code & 0x80u) << 24 | (code & 0x7Fu) << 20) * 0x1p120f
        : gck_float((code & 0x80u) << 24 | (code & 0x7Fu) << 21) * 0x1p112f;
}

/* ---- codes that are multiples of a step ---- */

/* m_or_inv is the result of gck_multiplier().  For int6 and int4: the codes of form A. */
GCK_FN uint8_t gck_code(gck_format format, int escaped, float x, float m_or_inv, int noise)
{
    if (gck_is_fp8(format)) {
        return gck_fp8_code(format, escaped, x, m_or_inv, noise);
    }
    const int code = noise < 0 ? gck_round_product(x, m_or_inv)
                               : gck_round_noisy(x, m_or_inv, noise, gck_top_code(format, escaped));
    return (uint8_t)(code & ((1 << gck_code_bits(format)) - 1));
}

/* The signed integer of such a code. */
GCK_FN int gck_signed(gck_format format, uint8_t code)
{
    const int shift = 8 - gck_code_bits(format);

    return (int8_t)(uint8_t)(code << shift) >> shift;
}

GCK_FN float gck_code_value(gck_format format, uint8_t code)
{
    return gck_is_fp8(format) ? gck_fp8_value(format, code) : (float)gck_signed(format, code);
}

/* value(code) * s, in steps, so that no intermediate over- or underflows: every product is exact
 * unless the result itself is subnormal. */
GCK_FN float gck_times_step(gck_format format, float value, uint32_t stored)
{
    return (value * (gck_float(stored << 16) * 0x1p-16f))
        * (gck_unit_escaped(format) * 0x1p16f);
}

/* ---- codes in memory ---- */

/* 128 codes, one per byte, packed:
 *     8 bits   as they are
 *     4 bits   byte b: code 2 b below, code 2 b + 1 above
 *     6 bits   64 bytes as with 4 bits; then 32 bytes of the upper two bits, byte b:
 *              codes 4 b, 4 b + 1, 4 b + 2, 4 b + 3 from the lowest bits on. */
GCK_HOT_FN void gck_pack_codes(gck_format format, const uint8_t *code, uint8_t *packed)
{
    if (gck_code_bits(format) == 8) {
        memcpy(packed, code, GCK_GROUP);
        return;
    }
    for (int b = 0; b < 64; b++) {
        packed[b] = (uint8_t)((code[2 * b] & 15) | (code[2 * b + 1] & 15) << 4);
    }
    for (int b = 0; b < 32 && gck_code_bits(format) == 6; b++) {
        packed[64 + b] = (uint8_t)(code[4 * b] >> 4 | code[4 * b + 1] >> 4 << 2 | code[4 * b + 2] >> 4 << 4
                                   | code[4 * b + 3] >> 4 << 6);
    }
}

GCK_HOT_FN void gck_unpack_codes(gck_format format, const uint8_t *packed, uint8_t *code)
{
    if (gck_code_bits(format) == 8) {
        memcpy(code, packed, GCK_GROUP);
        return;
    }
    for (int b = 0; b < 64; b++) {
        code[2 * b] = packed[b] & 15;
        code[2 * b + 1] = packed[b] >> 4;
    }
    for (int b = 0; b < 32 && gck_code_bits(format) == 6; b++) {
        for (int k = 0; k < 4; k++) {
            code[4 * b + k] |= (uint8_t)((packed[64 + b] >> (2 * k) & 3) << 4);
        }
    }
}

GCK_FN uint8_t gck_packed_code(gck_format format, const uint8_t *packed, int i)
{
    if (gck_code_bits(format) == 8) {
        return packed[i];
    }
    const int four = packed[i / 2] >> (4 * (i % 2)) & 15;
    return (uint8_t)(gck_code_bits(format) == 4 ? four : four | (packed[64 + i / 4] >> (2 * (i % 4)) & 3) << 4);
}

#endif
