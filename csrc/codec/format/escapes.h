/* escapes.h: values that no codes mean, and groups of the formats that are not rotated.
 *
 * Groups with escapes are rare, so values are processed one by one everywhere; group.h draws the
 * forms. */
#ifndef GRADCKPT_ESCAPES_H
#define GRADCKPT_ESCAPES_H

#include "codec/format/quantize.h"

#define GCK_ESC          0x8000u   /* the escape bit of a scale            */
#define GCK_ESC_TABLE    0xFF80u   /* the scale of a group in form B       */

/* Forms of rotated formats, in the lowest bits of the scale of a group that is not ordinary: bit 0
 * clear: rotated all the same, GCK_HAS_OUTLIERS says with what; set: a gck_form above it. */
typedef enum { GCK_FORM_PLAIN, GCK_FORM_SENTINEL, GCK_FORM_MASK, GCK_FORM_CLUSTERS } gck_form;
#define GCK_UNROTATED    1u
#define GCK_HAS_OUTLIERS 2u

GCK_FN uint32_t gck_form_bits(gck_form form) { return (uint32_t)form << 1 | GCK_UNROTATED; }
GCK_FN gck_form gck_form_of(uint32_t scale) { return (gck_form)(scale >> 1 & 3u); }

/* The words beside such a group; beside: 8 bits that int4 keeps there. */
#define GCK_INT4_UNUSUAL 0x7F80u   /* of side[1]: no outlier is infinite */

GCK_FN void gck_put_unusual(gck_format format, uint16_t *side, uint32_t scale, uint32_t beside)
{
    side[0] = (uint16_t)(GCK_ESC | scale);
    if (format == GCK_INT4) {
        side[1] = (uint16_t)(GCK_INT4_UNUSUAL | (beside & 0x7Fu) | (beside & 0x80u) << 8);
    }
}

GCK_FN uint32_t gck_unusual_bits(gck_format format, const uint16_t *side)
{
    return format == GCK_INT4 ? (side[1] & 0x7Fu) | (side[1] >> 8 & 0x80u) : 0u;
}

/* A step with `dropped` bits of float32's mantissa dropped, upwards. */
GCK_FN uint32_t gck_stored_unusual(float t, int dropped)
{
    const uint32_t below = (1u << dropped) - 1u;

    return ((gck_bits(t) + below) & ~below) >> 16;
}

/* ---- escapes ---- */

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
    if (gck_is_fp8(format)) {
        const uint8_t nan = format == GCK_E4M3 ? 0x7F : 0x7E, inf = format == GCK_E4M3 ? 0x7E : 0x7C;
        return (uint8_t)(kind == 0 ? nan : (kind <= 2 ? inf : 0x7D) | (kind % 2 == 0 ? 0x80 : 0));
    }
    const int half = 1 << (gck_code_bits(format) - 1);
    const int code = kind == 0 ? half : kind == 1 ? half - 1 : kind == 2 ? 1 - half : kind == 3 ? half - 2 : 2 - half;
    return (uint8_t)(code & (2 * half - 1));
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

/* ---- form B: codes of one bit less, and a table ---- */

GCK_FN int gck_table_bits(gck_format format) { return gck_code_bits(format) - 1; }

/* The last 16 bytes of a group's codes in form B. */
typedef struct {
    float    step;           /* stored   */
    float    table[3];
    int      used;           /* entries of the table */
    uint32_t infinite;       /* int4: 1 +Inf, 2 -Inf is among the values */
    uint32_t as_max;         /* int4: the code of 1 +Inf, 2 -Inf means MAX; stored as table[2] */
} gck_escape_table;

/* Where no code means MAX (int4), the code of an infinity that the group does not contain means MAX
 * of its sign.  A group that contains it needs an entry of its sign: where the first two values
 * have none, the first of that sign becomes the second entry. */
GCK_SLOW_FN void gck_choose_entries(gck_format format, gck_escape_table *t, const void *x, gck_dtype dtype, int count)
{
    for (int i = 0; i < count; i++) {
        const float v = gck_load(x, dtype, i);
        if ((gck_bits(v) & 0x7FFFFFFFu) == 0x7F800000u) {
            t->infinite |= 1u << (gck_bits(v) >> 31);
        }
    }
    for (int i = 0; i < count; i++) {
        const float v = gck_load(x, dtype, i);
        const uint32_t bits = gck_bits(v), first = gck_bits(t->table[0]), second = gck_bits(t->table[1]);
        if (!gck_escapes(v, dtype) || gck_escape_kind(v, dtype) < gck_table_kinds(format)) {
            continue;
        }
        if (t->used == 0) {
            t->table[t->used++] = v;
        } else if (bits != first && (t->used == 1 || ((t->infinite >> (bits >> 31) & 1u) != 0
                                                      && (first ^ second) >> 31 == 0 && (first ^ bits) >> 31 != 0))) {
            t->table[1] = v;
            t->used = 2;
        }
    }
}

/* Form B's code of v.  It adds to the table in order of appearance. */
GCK_FN uint32_t gck_table_code(gck_format format, gck_escape_table *t, float v, gck_dtype dtype, float scale, float inv)
{
    const int half = gck_table_half(format), kinds = gck_table_kinds(format), size = gck_table_size(format);
    const uint32_t special = (uint32_t)(2 * half + 1);

    if (!gck_escapes(v, dtype)) {
        return (uint32_t)(gck_round_product(v * scale, inv) + half);
    }
    const int kind = gck_escape_kind(v, dtype);
    if (kind < kinds) {
        return special + (uint32_t)kind;
    }
    for (int k = 0; k < t->used; k++) {
        if (gck_bits(t->table[k]) == gck_bits(v)) {
            return special + (uint32_t)(kinds + k);
        }
    }
    if (t->used == size) {                               /* MAX of its sign, or the first entry of its sign */
        const uint32_t negative = gck_bits(v) >> 31;
        if (kinds == 5) {
            return special + 3u + negative;
        }
        if (t->infinite >> negative & 1u) {
            return special + 3u + (negative ^ gck_bits(t->table[0]) >> 31);
        }
        t->as_max |= 1u << negative;
        return special + 1u + negative;
    }
    t->table[t->used] = v;
    return special + (uint32_t)(kinds + t->used++);
}

/* x: the first value of the group; `count` of its 128 values exist. */
GCK_SLOW_FN void gck_encode_table(gck_format format, const void *x, gck_dtype dtype, int count, float amax,
                                  uint8_t *codes)
{
    const int bits = gck_table_bits(format);
    const int k = amax < GCK_TINY ? 64 : 0;
    const float scale = gck_pow2(k);
    const float step = amax * scale * gck_table_factor(format);    /* of the scaled values */
    const float unit = gck_table_unit(format);
    const float inv = amax > 0.f ? 1.0f / (step * (unit * unit)) : 0.f;
    gck_escape_table t = {step * (k ? 0x1p-64f : 1.f), {0.f, 0.f, 0.f}, 0, 0u, 0u};
    uint32_t pending = 0;                                          /* bits not yet written */
    int npending = 0, at = 0;

    if (gck_table_kinds(format) < 5) {
        gck_choose_entries(format, &t, x, dtype, count);
    }
    for (int i = 0; i < GCK_GROUP; i++) {
        const float v = i < count ? gck_load(x, dtype, i) : 0.f;
        pending |= gck_table_code(format, &t, v, dtype, scale, inv) << npending;
        for (npending += bits; npending >= 8; npending -= 8) {
            codes[at++] = (uint8_t)pending;
            pending >>= 8;
        }
    }
    for (int w = 0; w < 4; w++) {
        const uint32_t u = w == 3 && gck_table_kinds(format) < 5 ? t.as_max
                         : gck_bits(w == 0 ? t.step : t.table[w - 1]);
        for (int b = 0; b < 4; b++) {
            codes[16 * bits + 4 * w + b] = (uint8_t)(u >> (8 * b));
        }
    }
}

GCK_FN float gck_read_f32(const uint8_t *p)
{
    return gck_float((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
}

GCK_SLOW_FN void gck_decode_table(gck_format format, const uint8_t *codes, void *x, gck_dtype dtype, int count)
{
    const int bits = gck_table_bits(format), half = gck_table_half(format), kinds = gck_table_kinds(format);
    const uint8_t *table = codes + 16 * bits;
    const float step = gck_read_f32(table), unit = gck_table_unit(format);
    const int as_max = kinds < 5 ? table[12] & 3 : 0;

    for (int i = 0; i < count; i++) {
        const int bit = bits * i, byte = bit / 8;
        const uint32_t two = codes[byte] | (byte + 1 < 16 * bits ? (uint32_t)codes[byte + 1] << 8 : 0u);
        const int c = (int)(two >> (bit % 8) & ((1u << bits) - 1u)) - half, special = c - half - 1;
        if (special < 0) {
            gck_store(x, dtype, i, ((float)c * (step * unit)) * unit);
        } else if (special < kinds) {
            const int max = special > 0 && (as_max & special) != 0;
            gck_store_escape(x, dtype, i, gck_escape_value(special + (max ? 2 : 0), dtype));
        } else {
            const int entry = special - kinds < gck_table_size(format) ? special - kinds : 0;
            gck_store_escape(x, dtype, i, gck_read_f32(table + 4 + 4 * entry));
        }
    }
}

/* ---- the formats that are not rotated: form A, and groups without escapes ---- */

/* noise: of the group's values; NULL rounds to nearest.  A group in form B is always rounded to
 * nearest. */
GCK_FN void gck_encode_unrotated(gck_format format, const void *x, gck_dtype dtype, int count, const uint16_t *noise,
                                 uint8_t *codes, uint16_t *side)
{
    uint8_t code[GCK_GROUP];
    float amax = 0.f;
    int escaped = 0, other = 0;

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
        gck_encode_table(format, x, dtype, count, amax, codes);
        side[0] = GCK_ESC_TABLE;
        return;
    }
    const int k = gck_prescale(format, amax);
    const float scale = gck_pow2(k);
    const uint32_t stored = amax > 0.f ? gck_stored(format, escaped, noise != NULL, amax * scale) : 0u;
    const float m = amax > 0.f ? gck_multiplier(format, escaped, stored) : 0.f;

    for (int i = 0; i < GCK_GROUP; i++) {
        const float v = i < count ? gck_load(x, dtype, i) : 0.f;
        code[i] = gck_escapes(v, dtype) ? gck_escape_code(format, gck_escape_kind(v, dtype))
                : amax > 0.f ? gck_code(format, escaped, v * scale, m, noise != NULL ? noise[i] : GCK_NEAREST) : 0;
    }
    gck_pack_codes(format, code, codes);
    side[0] = (uint16_t)((amax > 0.f ? stored - (uint32_t)(k * 128) : 0u) | (escaped ? GCK_ESC : 0u));
}

GCK_FN void gck_decode_unrotated(gck_format format, const uint8_t *codes, uint32_t scale, void *x, gck_dtype dtype,
                                 int count)
{
    if (scale == GCK_ESC_TABLE) {
        gck_decode_table(format, codes, x, dtype, count);
        return;
    }
    for (int i = 0; i < count; i++) {
        const uint8_t code = gck_packed_code(format, codes, i);
        const int kind = scale & GCK_ESC ? gck_escape_of_code(format, code) : -1;
        if (kind >= 0) {
            gck_store_escape(x, dtype, i, gck_escape_value(kind, dtype));
        } else {
            gck_store(x, dtype, i, gck_times_step(format, gck_code_value(format, code), scale & 0x7FFFu));
        }
    }
}

#endif
