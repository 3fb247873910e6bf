/* group.h: the payload of the group codecs, value by value.
 *
 * This header is the format.  It is compiled as C for the host reference and as
 * device code by the .cu files, so that there is one text for both; the SIMD files
 * call it for every group that is not ordinary.
 *
 * Payload of n values, G = ceil(n / 128) groups, the last one padded with zeros:
 *
 *     uint8_t  code[G][128];      offset 0
 *     uint16_t scale[G];          offset 128 G
 *
 * 8.125 bits a value.  `scale` is the upper half of a float32, without a sign:
 *
 *      15    14 ........ 7   6 ....... 0
 *     [esc] [ exponent    ] [ mantissa   ]     stored = 2^32 x the group's step s
 *                                              (fp8_e5m2: 2^40 x s)
 *
 * The offset lets the steps of every float32 amax, subnormal ones included, be normal
 * numbers of 8 exponent bits; 0 is the step of a zero group.
 *
 * Ordinary group (esc = 0): x' = value(code) * s, in float32, rounded once to the dtype.
 *   fp8_*       value(code) is the OCP FP8 value; s = amax / MAX, nearest.
 *   int8_plain  value(code) is the signed byte;   s = amax / 127, rounded up.
 *   int8        y = H (d o x) with H the 128-point Hadamard matrix (natural order,
 *               entries +-1) and d the signs below; the codes are those of y with
 *               step S = 128 s = amax(y) / 127, rounded up;
 *               x' = d o (H code) * s: integers until the last multiplication.
 *
 * A value escapes when it is NaN, infinite, beyond 1e30, or the dtype's largest
 * finite value: no activation, but masks merged into biases hold such things.
 * They take no part in amax.  A group that holds one has esc = 1 and is stored
 * unrotated, in one of two forms:
 *   A (exponent < 255): as the ordinary group of fp8_* or int8_plain, but the largest
 *     codes are taken for the escapes:      NaN    +-Inf       +-MAX      amax maps to
 *       int8, int8_plain                   -128   +-127       +-126        +-125
 *       fp8_e4m3                           0x7F   0x7E/0xFE   0x7D/0xFD      384
 *       fp8_e5m2                           0x7E   0x7C/0xFC   0x7D/0xFD    57344
 *     (MAX: the dtype's largest finite value).
 *   B (scale = 0xFF80): some value lies between 1e30 and MAX.
 *       bytes   0..111  128 codes of 7 bits, little-endian bit order
 *       bytes 112..115  float32, 2^32 x the step amax / 59
 *       bytes 116..127  float32 table[3]: the distinct such values, by first appearance
 *     code c: c <= 118 is c - 59 steps; 119 NaN, 120 +Inf, 121 -Inf, 122 +MAX,
 *     123 -MAX, 124..126 table[c - 124].  A fourth distinct value becomes +-MAX.
 * int8 also uses form A for a group whose amax(y) is below 2^-80.
 *
 * Every float operation below is IEEE float32, to nearest even, subnormals kept,
 * nothing contracted.  Source of the FP8 formats: OCP 8-bit Floating Point
 * Specification 1.0; of the rotation: Ashkboos et al. 2024, arXiv:2404.00456. */
#ifndef GRADCKPT_GROUP_H
#define GRADCKPT_GROUP_H

#include <math.h>
#include <string.h>

#include "../gradckpt.h"

#ifdef __CUDACC__
#define GCK_FN static __device__ __forceinline__
#define GCK_SLOW_FN static __device__ __noinline__
#else
#define GCK_FN static inline
#define GCK_SLOW_FN static inline
#endif

enum { GCK_GROUP = 128 };

typedef enum { GCK_E4M3, GCK_E5M2, GCK_INT8, GCK_INT8_PLAIN, GCK_NFORMATS } gck_format;

#define GCK_ESC        0x8000u     /* the escape bit of a scale                  */
#define GCK_ESC_TABLE  0xFF80u     /* the scale of a group in form B             */
#define GCK_TINY       0x1p-80f    /* below: values are scaled by 2^64 first     */
#define GCK_LARGE      0x1p13f     /* fp8, from here on: scaled by 2^-96 first   */

/* Hadamard signs: bit i set means value i is negated.  The first 128 bits of the
 * fraction of pi, so that nobody wonders. */
#define GCK_SIGNS_0 0x243F6A88u
#define GCK_SIGNS_1 0x85A308D3u
#define GCK_SIGNS_2 0x13198A2Eu
#define GCK_SIGNS_3 0x03707344u

/* ---- bits ---- */

GCK_FN uint32_t gck_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

GCK_FN float gck_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

GCK_FN float gck_abs(float f) { return gck_float(gck_bits(f) & 0x7FFFFFFFu); }

GCK_FN uint32_t gck_sign_word(int word)
{
    return word == 0 ? GCK_SIGNS_0 : word == 1 ? GCK_SIGNS_1 : word == 2 ? GCK_SIGNS_2 : GCK_SIGNS_3;
}

GCK_FN int gck_negated(int i) { return (int)(gck_sign_word(i / 32) >> (i % 32)) & 1; }

/* ---- dtypes ---- */

GCK_FN float gck_from_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t rest = h & 0x7FFFu;

    if (rest >= 0x7C00u) {                         /* Inf, NaN */
        return gck_float(sign | 0x7F800000u | ((rest & 0x3FFu) << 13));
    }
    /* Multiplying by a power of two normalises a subnormal: exact. */
    return gck_float(sign | gck_bits(gck_float(rest << 13) * 0x1p112f));
}

/* v is finite or NaN, |v| <= 65504: the decoders clamp. */
GCK_FN uint16_t gck_to_f16(float v)
{
    const uint32_t u = gck_bits(v);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t abs = u & 0x7FFFFFFFu;

    if (abs >= 0x7F800000u) {
        return (uint16_t)(sign | (abs > 0x7F800000u ? 0x7E00u : 0x7C00u));
    }
    if (abs < 0x38800000u) {                       /* below 2^-14: to multiples of 2^-24 */
        return (uint16_t)(sign | (gck_bits(gck_float(abs) + 0.5f) - 0x3F000000u));
    }
    return (uint16_t)(sign | ((abs + 0xFFFu + ((abs >> 13) & 1u) - 0x38000000u) >> 13));
}

GCK_FN uint16_t gck_to_bf16(float v)
{
    const uint32_t u = gck_bits(v);

    if ((u & 0x7FFFFFFFu) > 0x7F800000u) {
        return 0x7FC0u;
    }
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

/* Value i of x as float32: exact. */
GCK_FN float gck_load(const void *x, gck_dtype dtype, int64_t i)
{
    switch (dtype) {
    case GCK_F16:  return gck_from_f16(((const uint16_t *)x)[i]);
    case GCK_BF16: return gck_float((uint32_t)((const uint16_t *)x)[i] << 16);
    default:       return ((const float *)x)[i];
    }
}

/* Largest finite value that is not an escape: as float32 bits, comparable as integers. */
GCK_FN uint32_t gck_limit(gck_dtype dtype)
{
    return dtype == GCK_F16 ? 0x477FC000u     /* 65472 */
         : dtype == GCK_BF16 ? 0x71490000u    /* the last bfloat16 below 1e30 */
                             : 0x7149F2CAu;   /* 1e30f */
}

GCK_FN float gck_max_value(gck_dtype dtype)
{
    return gck_float(dtype == GCK_F16 ? 0x477FE000u : dtype == GCK_BF16 ? 0x7F7F0000u : 0x7F7FFFFFu);
}

/* v in the dtype, rounded once.  As it is for an escape, which is exact in its dtype. */
GCK_FN void gck_store_escape(void *x, gck_dtype dtype, int64_t i, float v)
{
    if (dtype == GCK_F16) {
        ((uint16_t *)x)[i] = gck_to_f16(v);
    } else if (dtype == GCK_BF16) {
        ((uint16_t *)x)[i] = gck_to_bf16(v);
    } else {
        ((float *)x)[i] = v;
    }
}

/* An ordinary value: a float16 never overflows into an escape. */
GCK_FN void gck_store(void *x, gck_dtype dtype, int64_t i, float v)
{
    gck_store_escape(x, dtype, i, dtype != GCK_F16 ? v : v > 65472.f ? 65472.f : v < -65472.f ? -65472.f : v);
}

/* ---- steps ---- */

/* The code that amax maps to. */
GCK_FN float gck_top(gck_format format, int escaped)
{
    return format == GCK_E4M3 ? (escaped ? 384.f : 448.f)
         : format == GCK_E5M2 ? 57344.f
                              : (escaped ? 125.f : 127.f);
}

/* 2^32 / top (E5M2: 2^40 / top) in float32; 2^25 / 127 for y.  Constants: folded. */
GCK_FN float gck_step_factor(gck_format format, int escaped)
{
    return format == GCK_E4M3 ? (escaped ? (float)(0x1p32 / 384) : (float)(0x1p32 / 448))
         : format == GCK_E5M2 ? (float)(0x1p40 / 57344)
         : escaped            ? (float)(0x1p32 / 125)
         : format == GCK_INT8 ? (float)(0x1p25 / 127)
                              : (float)(0x1p32 / 127);
}

/* amax (scaled by 2^k, so normal) -> stored, without the escape bit. */
GCK_FN uint32_t gck_stored(gck_format format, int escaped, float amax)
{
    const uint32_t t = gck_bits(amax * gck_step_factor(format, escaped));

    return format == GCK_E4M3 || format == GCK_E5M2
        ? (t + 0x7FFFu + ((t >> 16) & 1u)) >> 16     /* nearest: the top code saturates */
        : (t + 0xFFFFu) >> 16;                       /* up: no code exceeds 127 */
}

/* 1 / s, where s = stored * 2^-32 (E5M2: 2^-40; the step of y: 2^-25). */
GCK_FN float gck_inverse(gck_format format, int escaped, uint32_t stored)
{
    return 1.0f / (gck_float(stored << 16) * (format == GCK_E5M2              ? 0x1p-40f
                                              : format == GCK_INT8 && !escaped ? 0x1p-25f
                                                                               : 0x1p-32f));
}

/* ---- one value ---- */

/* The exact product, rounded to the nearest integer, ties to even. */
GCK_FN int gck_round_product(float x, float inv)
{
#ifdef __CUDA_ARCH__
    return __float_as_int(__fmaf_rn(x, inv, 12582912.f)) - 0x4B400000;
#else
    return (int)lrint((double)x * (double)inv);
#endif
}

/* OCP FP8 of x * m, where m = 2^-120 / s (E4M3) or 2^-112 / s (E5M2): that moves the
 * float32 exponent onto the FP8 exponent, subnormals onto subnormals, so that rounding
 * is one addition.  |x / s| is at most the format's maximum and a little. */
GCK_FN uint8_t gck_fp8_code(gck_format format, float x, float m)
{
    const uint32_t u = gck_bits(x * m);
    const uint32_t abs = u & 0x7FFFFFFFu;
    const int drop = format == GCK_E4M3 ? 20 : 21;

    return (uint8_t)(((abs + (1u << (drop - 1)) - 1u + ((abs >> drop) & 1u)) >> drop) | (u >> 24 & 0x80u));
}

GCK_FN float gck_fp8_shift(gck_format format) { return format == GCK_E4M3 ? 0x1p-120f : 0x1p-112f; }

GCK_FN float gck_fp8_value(gck_format format, uint8_t code)
{
    return format == GCK_E4M3
        ? gck_float((code & 0x80u) << 24 | (code & 0x7Fu) << 20) * 0x1p120f
        : gck_float((code & 0x80u) << 24 | (code & 0x7Fu) << 21) * 0x1p112f;
}

/* value(code) * s.  In steps, so that nothing over- or underflows on the way: every
 * product is exact unless the result itself is subnormal. */
GCK_FN float gck_times_step(gck_format format, float value, uint32_t stored)
{
    return (value * (gck_float(stored << 16) * 0x1p-16f)) * (format == GCK_E5M2 ? 0x1p-24f : 0x1p-16f);
}

/* ---- groups: ordinary ---- */

/* In place.  Stages in the order of the index bits 0, 1, ... 6: the order is part of
 * the format, since float addition is not associative. */
GCK_FN void gck_hadamard(float *y)
{
    for (int h = 1; h < GCK_GROUP; h *= 2) {
        for (int i = 0; i < GCK_GROUP; i += 2 * h) {
            for (int j = i; j < i + h; j++) {
                const float a = y[j], b = y[j + h];
                y[j] = a + b;
                y[j + h] = a - b;
            }
        }
    }
}

/* One code of an unrotated format; m_or_inv as gck_multiplier() gives it. */
GCK_FN uint8_t gck_code(gck_format format, float x, float m_or_inv)
{
    return format == GCK_E4M3 || format == GCK_E5M2
        ? gck_fp8_code(format, x, m_or_inv)
        : (uint8_t)(int8_t)gck_round_product(x, m_or_inv);
}

GCK_FN float gck_multiplier(gck_format format, int escaped, uint32_t stored)
{
    const float inv = gck_inverse(format, escaped, stored);

    return format == GCK_E4M3 || format == GCK_E5M2 ? inv * gck_fp8_shift(format) : inv;
}

/* The exponent k of the scaling 2^k that keeps every intermediate normal: for fp8, m is
 * 2^-120 / s and must not be subnormal for amax up to 1e30. */
GCK_FN int gck_prescale(gck_format format, float amax)
{
    return amax < GCK_TINY ? 64
         : amax >= GCK_LARGE && (format == GCK_E4M3 || format == GCK_E5M2) ? -96 : 0;
}

GCK_FN float gck_pow2(int k) { return k > 0 ? 0x1p64f : k < 0 ? 0x1p-96f : 1.f; }

GCK_FN float gck_code_value(gck_format format, uint8_t code)
{
    return format == GCK_E4M3 || format == GCK_E5M2 ? gck_fp8_value(format, code) : (float)(int8_t)code;
}

/* ---- groups: escapes ---- */

GCK_FN int gck_escapes(float v, gck_dtype dtype) { return (gck_bits(v) & 0x7FFFFFFFu) > gck_limit(dtype); }

/* 0 NaN, 1 +Inf, 2 -Inf, 3 +MAX, 4 -MAX, 5 other; v escapes. */
GCK_FN int gck_escape_kind(float v, gck_dtype dtype)
{
    const uint32_t abs = gck_bits(v) & 0x7FFFFFFFu;
    const int negative = gck_bits(v) >> 31 != 0;

    return abs > 0x7F800000u ? 0
         : abs == 0x7F800000u ? 1 + negative
         : abs == gck_bits(gck_max_value(dtype)) ? 3 + negative : 5;
}

GCK_FN float gck_escape_value(int kind, gck_dtype dtype)
{
    const float max = gck_max_value(dtype);

    return kind == 0 ? gck_float(0x7FC00000u)
         : kind == 1 ? gck_float(0x7F800000u)
         : kind == 2 ? gck_float(0xFF800000u)
         : kind == 3 ? max : -max;
}

/* Form A's code for a kind 0..4. */
GCK_FN uint8_t gck_escape_code(gck_format format, int kind)
{
    if (format == GCK_E4M3 || format == GCK_E5M2) {
        const uint8_t nan = format == GCK_E4M3 ? 0x7F : 0x7E, inf = format == GCK_E4M3 ? 0x7E : 0x7C;
        return (uint8_t)(kind == 0 ? nan : (kind <= 2 ? inf : 0x7D) | (kind % 2 == 0 ? 0x80 : 0));
    }
    return (uint8_t)(int8_t)(kind == 0 ? -128 : kind == 1 ? 127 : kind == 2 ? -127 : kind == 3 ? 126 : -126);
}

/* The inverse: a kind, or -1 for the code of a finite value. */
GCK_FN int gck_escape_of_code(gck_format format, uint8_t code)
{
    for (int kind = 0; kind < 5; kind++) {
        if (gck_escape_code(format, kind) == code) {
            return kind;
        }
    }
    return -1;
}

/* What form B stores in the last 16 bytes of a group's codes. */
typedef struct {
    float    step;           /* 2^32 x s */
    float    table[3];
    int      used;           /* entries of the table */
} gck_escape_table;

/* Form B's code of v; adds to the table in order of appearance. */
GCK_FN uint32_t gck_table_code(gck_escape_table *t, float v, gck_dtype dtype, float scale, float inv)
{
    if (!gck_escapes(v, dtype)) {
        return (uint32_t)(gck_round_product(v * scale, inv) + 59);
    }
    const int kind = gck_escape_kind(v, dtype);
    if (kind < 5) {
        return 119u + (uint32_t)kind;
    }
    for (int k = 0; k < t->used; k++) {
        if (gck_bits(t->table[k]) == gck_bits(v)) {
            return 124u + (uint32_t)k;
        }
    }
    if (t->used == 3) {
        return gck_bits(v) >> 31 ? 123u : 122u;
    }
    t->table[t->used] = v;
    return 124u + (uint32_t)t->used++;
}

/* x: the first value of the group; `count` of its 128 values exist. */
GCK_SLOW_FN uint16_t gck_encode_table(const void *x, gck_dtype dtype, int count, float amax, uint8_t *codes)
{
    const int k = amax < GCK_TINY ? 64 : 0;
    const float scale = gck_pow2(k);
    const float step = amax * scale * (float)(0x1p32 / 59);        /* of the scaled values */
    const float inv = amax > 0.f ? 1.0f / (step * 0x1p-32f) : 0.f;
    gck_escape_table t = {step * (k ? 0x1p-64f : 1.f), {0.f, 0.f, 0.f}, 0};
    uint32_t pending = 0;                                          /* bits not yet written */
    int npending = 0, at = 0;

    for (int i = 0; i < GCK_GROUP; i++) {
        const float v = i < count ? gck_load(x, dtype, i) : 0.f;
        pending |= gck_table_code(&t, v, dtype, scale, inv) << npending;
        for (npending += 7; npending >= 8; npending -= 8) {
            codes[at++] = (uint8_t)pending;
            pending >>= 8;
        }
    }
    for (int w = 0; w < 4; w++) {
        const uint32_t u = gck_bits(w == 0 ? t.step : t.table[w - 1]);
        for (int b = 0; b < 4; b++) {
            codes[112 + 4 * w + b] = (uint8_t)(u >> (8 * b));
        }
    }
    return (uint16_t)GCK_ESC_TABLE;
}

GCK_FN float gck_read_f32(const uint8_t *p)
{
    return gck_float((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
}

GCK_SLOW_FN void gck_decode_table(const uint8_t *codes, void *x, gck_dtype dtype, int count)
{
    const float step = gck_read_f32(codes + 112);

    for (int i = 0; i < count; i++) {
        const int bit = 7 * i, byte = bit / 8;
        const uint32_t two = codes[byte] | (byte < 111 ? (uint32_t)codes[byte + 1] << 8 : 0u);
        const int c = (int)(two >> (bit % 8) & 0x7Fu);
        if (c <= 118) {
            gck_store(x, dtype, i, ((float)(c - 59) * (step * 0x1p-16f)) * 0x1p-16f);
        } else if (c <= 123) {
            gck_store_escape(x, dtype, i, gck_escape_value(c - 119, dtype));
        } else {
            gck_store_escape(x, dtype, i, gck_read_f32(codes + 116 + 4 * (c < 127 ? c - 124 : 0)));
        }
    }
}

/* ---- groups: every one ---- */

/* Any group that is not rotated: ordinary, tiny, large, or with escapes. */
GCK_SLOW_FN uint16_t gck_encode_unrotated(gck_format format, const void *x, gck_dtype dtype, int count,
                                          int escaped, uint8_t *codes)
{
    float amax = 0.f;
    int other = 0;

    for (int i = 0; i < count; i++) {
        const float v = gck_load(x, dtype, i);
        if (gck_escapes(v, dtype)) {
            escaped = 1;
            other |= gck_escape_kind(v, dtype) == 5;
        } else if (gck_abs(v) > amax) {
            amax = gck_abs(v);
        }
    }
    if (other) {
        return gck_encode_table(x, dtype, count, amax, codes);
    }
    const int k = gck_prescale(format, amax);
    const float scale = gck_pow2(k);
    const uint32_t stored = amax > 0.f ? gck_stored(format, escaped, amax * scale) : 0u;
    /* The rounding and the top of int8 in form A are those of int8_plain. */
    const float m = amax > 0.f ? gck_multiplier(format == GCK_INT8 ? GCK_INT8_PLAIN : format, escaped, stored) : 0.f;

    for (int i = 0; i < GCK_GROUP; i++) {
        const float v = i < count ? gck_load(x, dtype, i) : 0.f;
        codes[i] = gck_escapes(v, dtype) ? gck_escape_code(format, gck_escape_kind(v, dtype))
                 : amax > 0.f ? gck_code(format, v * scale, m) : 0;
    }
    return (uint16_t)((amax > 0.f ? stored - (uint32_t)(k * 128) : 0u) | (escaped ? GCK_ESC : 0u));
}

/* int8.  y: scratch of 128 floats. */
GCK_SLOW_FN uint16_t gck_encode_rotated(const void *x, gck_dtype dtype, int count, float *y, uint8_t *codes)
{
    float amax = 0.f;
    int special = 0;

    for (int i = 0; i < GCK_GROUP; i++) {
        const float v = i < count ? gck_load(x, dtype, i) : 0.f;
        special |= gck_escapes(v, dtype);
        y[i] = gck_negated(i) ? -v : v;
    }
    if (!special) {
        gck_hadamard(y);
        for (int i = 0; i < GCK_GROUP; i++) {
            amax = gck_abs(y[i]) > amax ? gck_abs(y[i]) : amax;
        }
    }
    if (special || (amax > 0.f && amax < GCK_TINY)) {
        return gck_encode_unrotated(GCK_INT8, x, dtype, count, 1, codes);
    }
    const uint32_t stored = amax > 0.f ? gck_stored(GCK_INT8, 0, amax) : 0u;
    const float inv = amax > 0.f ? gck_inverse(GCK_INT8, 0, stored) : 0.f;
    for (int i = 0; i < GCK_GROUP; i++) {
        codes[i] = (uint8_t)(int8_t)gck_round_product(y[i], inv);
    }
    return (uint16_t)stored;
}

/* The reference encoder of one group: writes 128 codes, returns the scale. */
GCK_FN uint16_t gck_encode_group(gck_format format, const void *x, gck_dtype dtype, int count, uint8_t *codes)
{
    if (format == GCK_INT8) {
        float y[GCK_GROUP];
        return gck_encode_rotated(x, dtype, count, y, codes);
    }
    return gck_encode_unrotated(format, x, dtype, count, 0, codes);
}

GCK_SLOW_FN void gck_decode_unrotated(gck_format format, const uint8_t *codes, uint16_t scale,
                                      void *x, gck_dtype dtype, int count)
{
    if (scale == GCK_ESC_TABLE) {
        gck_decode_table(codes, x, dtype, count);
        return;
    }
    for (int i = 0; i < count; i++) {
        const int kind = scale & GCK_ESC ? gck_escape_of_code(format, codes[i]) : -1;
        if (kind >= 0) {
            gck_store_escape(x, dtype, i, gck_escape_value(kind, dtype));
        } else {
            gck_store(x, dtype, i, gck_times_step(format, gck_code_value(format, codes[i]), scale & 0x7FFFu));
        }
    }
}

/* The reference decoder of one group: writes its first `count` values to x. */
GCK_FN void gck_decode_group(gck_format format, const uint8_t *codes, uint16_t scale,
                             void *x, gck_dtype dtype, int count)
{
    if (format != GCK_INT8 || scale & GCK_ESC) {
        gck_decode_unrotated(format, codes, scale, x, dtype, count);
        return;
    }
    int32_t y[GCK_GROUP];                          /* |sums| <= 128 * 128: exact in any order */
    for (int i = 0; i < GCK_GROUP; i++) {
        y[i] = (int8_t)codes[i];
    }
    for (int h = 1; h < GCK_GROUP; h *= 2) {
        for (int i = 0; i < GCK_GROUP; i++) {
            if (!(i & h)) {
                const int32_t a = y[i], b = y[i + h];
                y[i] = a + b;
                y[i + h] = a - b;
            }
        }
    }
    for (int i = 0; i < count; i++) {
        const float v = (float)y[i] * (gck_float((uint32_t)scale << 16) * 0x1p-32f);
        gck_store(x, dtype, i, gck_negated(i) ? -v : v);
    }
}

#endif
