/* centred.h: rotated groups whose mean, or up to eight of whose values, are stored beside the rest.
 *
 * group.h draws the header; docs/codecs.md says how they are found.  Every sum that decides is one
 * of integers, so that its order is free. */
#ifndef GRADCKPT_CENTRED_H
#define GRADCKPT_CENTRED_H

#include "codec/format/escapes.h"
#include "codec/format/header.h"
#include "codec/format/rotate.h"

enum {
    GCK_MOST_OUTLIERS = 8,
    GCK_EXACT_OUTLIERS = 2,      /* so many are stored as float32, more as bfloat16 */
    GCK_NARROW_MEAN = 9, GCK_WIDE_MEAN = 14,     /* bits */
};

/* A group that is stored so. */
typedef struct {
    float    mean;                           /* 0: none  */
    int      mean_bits;                      /* 0, GCK_NARROW_MEAN, GCK_WIDE_MEAN */
    int      one_sign;                       /* no value has the other sign than the mean */
    int      n;                              /* outliers */
    uint8_t  at[GCK_MOST_OUTLIERS];          /* their indices, the largest from the mean first */
    uint32_t stored;                         /* the step           */
} gck_centred;

/* ---- sizes ---- */

GCK_FN int gck_header_bits(int n, int mean_bits)
{
    return n == 0 ? mean_bits : 4 + mean_bits + (n <= GCK_EXACT_OUTLIERS ? n * (7 + 32) : 8 + n * (7 + 12));
}

/* ---- the mean ---- */

GCK_FN int gck_exponent(float v) { return (int)(gck_bits(v) >> 23 & 0xFFu); }

/* 2^(k + 127 - exponent): what brings a value of this biased exponent to 2^k and more, below 2^(k + 1). */
GCK_FN float gck_to_scale(int exponent, int k) { return gck_float((uint32_t)(254 + k - exponent) << 23); }

/* The inverse, for an exponent above k. */
GCK_FN float gck_from_scale(int exponent, int k) { return gck_float((uint32_t)(exponent - k) << 23); }

/* The stored step whose exponent is the least that a mean's field of 4 bits can be relative to, and
 * the exponent of field 0. */
GCK_FN int gck_mean_exponent(uint32_t stored) { return (int)(stored >> 7) - 25; }

GCK_FN uint32_t gck_least_stored(float mean, int mean_bits)
{
    const int exponent = gck_exponent(mean) + 25 - (mean_bits == GCK_WIDE_MEAN ? 15 : 7);

    return mean != 0.f && exponent > 0 ? (uint32_t)exponent << 7 : 0u;
}

/* Of the values whose word of `kept` is all ones, not 0: their mean, rounded to bfloat16. */
GCK_SLOW_FN float gck_mean_of(const float *x, const uint32_t *kept)
{
    float of[GCK_GROUP];

    for (int i = 0; i < GCK_GROUP; i++) {
        of[i] = gck_float(gck_bits(x[i]) & kept[i]);
    }
    const float largest = gck_largest_of(of, GCK_GROUP);
    if (largest < GCK_TINY) {
        return 0.f;
    }
    const int exponent = gck_exponent(largest);
    const float scale = gck_to_scale(exponent, 15), back = gck_from_scale(exponent, 15);
    int32_t sum = 0, n = 0;

    for (int i = 0; i < GCK_GROUP; i++) {                        /* to integers by the last bits of 1.5 x 2^23 */
        sum += (int32_t)gck_bits(of[i] * scale + 12582912.f) - 0x4B400000;
        n += kept[i] != 0;
    }
    return n == 0 ? 0.f : gck_float((uint32_t)gck_to_bf16((float)sum / (float)n * back) << 16);
}

/* ---- the outliers ---- */

/* Distances from a mean, times a scale that brings the largest one to 2^11 and more: the sum of their
 * squares, the eight largest (0: none further is worth a look) and where they are. */
typedef struct {
    uint32_t sum, largest[GCK_MOST_OUTLIERS];
    uint8_t  at[GCK_MOST_OUTLIERS];
    float    scale;              /* 0: all are tiny */
} gck_distances;

/* 0 when gck_consider() chooses none, even if all eight were as large as the largest. */
GCK_FN int gck_may_have_outliers(gck_format format, uint32_t sum, uint32_t largest)
{
    const uint64_t square = (uint64_t)largest * largest;
    const uint64_t none = (uint64_t)gck_coarse_noise(format, gck_header_bits(0, GCK_NARROW_MEAN));

    for (uint64_t k = 1; k <= GCK_MOST_OUTLIERS; k++) {
        const uint64_t noise = (uint64_t)gck_coarse_noise(format, gck_header_bits((int)k, GCK_NARROW_MEAN));
        if (k * square >= sum || (sum - k * square) * noise < sum * none) {
            return 1;
        }
    }
    return 0;
}

GCK_SLOW_FN void gck_measure(gck_format format, const float *x, float mean, gck_distances *d)
{
    float z[GCK_GROUP];
    uint32_t q[GCK_GROUP];

    for (int i = 0; i < GCK_GROUP; i++) {
        z[i] = gck_abs(x[i] - mean);
    }
    const float largest = gck_largest_of(z, GCK_GROUP);
    const float scale = largest < GCK_TINY ? 0.f : gck_to_scale(gck_exponent(largest), 11);
    d->scale = scale;
    d->sum = 0;
    for (int i = 0; i < GCK_GROUP; i++) {
        q[i] = (uint32_t)(int32_t)(z[i] * scale);
        d->sum += q[i] * q[i];
    }
    d->largest[0] = 0;
    if (!gck_may_have_outliers(format, d->sum, (uint32_t)(int32_t)(largest * scale))) {
        return;
    }
    for (int k = 0; k < GCK_MOST_OUTLIERS; k++) {
        uint32_t best = 0;
        for (int i = 0; i < GCK_GROUP; i++) {                    /* the first of the largest */
            const uint32_t key = q[i] << 7 | (uint32_t)(GCK_GROUP - 1 - i);
            best = key > best ? key : best;
        }
        d->at[k] = (uint8_t)(GCK_GROUP - 1 - (best & 127u));
        d->largest[k] = best >> 7;
        q[d->at[k]] = 0;
    }
}

/* How many outliers make the error least: each comes in turn, the largest first. */
typedef struct {
    uint32_t sum;                /* of the squares that are left */
    int      n;                  /* the best number, ... */
    uint32_t rest;               /* ... the sum that it leaves, ... */
    uint64_t noise;              /* ... and its error */
} gck_outlier_choice;

GCK_FN gck_outlier_choice gck_no_outlier(gck_format format, uint32_t sum)
{
    const gck_outlier_choice none = {sum, 0, sum, (uint64_t)sum * (uint64_t)gck_coarse_noise(format, GCK_NARROW_MEAN)};

    return none;
}

/* Outlier number k, from 1 on. */
GCK_FN void gck_consider(gck_format format, gck_outlier_choice *c, int k, uint32_t size)
{
    c->sum -= size * size;
    const uint64_t noise = (uint64_t)c->sum * (uint64_t)gck_coarse_noise(format, gck_header_bits(k, GCK_NARROW_MEAN));
    if (size > 0 && noise < c->noise) {
        c->n = k;
        c->rest = c->sum;
        c->noise = noise;
    }
}

/* ---- a group ---- */

/* y = H (d o (x - mean)), zero where a value is not kept; returns amax(y). */
GCK_SLOW_FN float gck_rotate_centred(const float *x, const uint32_t *kept, float mean, int pattern, float *y)
{
    for (int i = 0; i < GCK_GROUP; i++) {
        y[i] = gck_float(gck_bits(x[i] - mean) & kept[i]);
    }
    gck_negate(y, pattern);
    gck_hadamard(y);
    return gck_largest_of(y, GCK_GROUP);
}

/* The mean as it is stored: not at all, if it is not worth its bits.  rest: the sum of the squares that are
 * not of outliers, of distances times `scale`. */
GCK_FN void gck_settle_mean(gck_centred *c, uint32_t rest, float scale)
{
    const float mean = c->mean * scale, square = mean * mean * 128.f;

    c->mean_bits = 0;
    if (!c->one_sign && !(square > 0.25f * (float)rest)) {
        c->mean = 0.f;
    } else if (square <= 16.f * (float)rest) {
        c->mean = gck_float((gck_bits(c->mean) + 0x7FFFFu + (gck_bits(c->mean) >> 20 & 1u)) & 0xFFF00000u);
        c->mean_bits = GCK_NARROW_MEAN;
    } else {
        c->mean_bits = GCK_WIDE_MEAN;
    }
    c->mean_bits = c->mean == 0.f ? 0 : c->mean_bits;
}

/* The step for amax(y), and the square of the error beside `ordinary`, the step without; a large number
 * where no such form is possible. */
GCK_FN float gck_settle_step(gck_format format, gck_centred *c, float amax, uint32_t ordinary)
{
    const uint32_t least = gck_least_stored(c->mean, c->mean_bits);

    c->stored = amax >= GCK_LEAST ? gck_stored_unusual(amax * gck_factor(format), 18) : 0u;
    c->stored = c->stored > least ? c->stored : least;
    if (c->one_sign && c->mean != 0.f && gck_exponent(c->mean) < gck_mean_exponent(c->stored)) {
        c->mean = gck_float((gck_bits(c->mean) & 0x80000000u) | (uint32_t)gck_mean_exponent(c->stored) << 23);
    }
    if ((c->n == 0 && c->mean == 0.f)
        || (c->mean != 0.f && gck_exponent(c->mean) < gck_mean_exponent(c->stored))) {
        return 0x1p100f;
    }
    const float ratio = gck_float(c->stored << 16) / gck_float(ordinary << 16);
    return ratio * ratio * (float)gck_coarse_noise(format, gck_header_bits(c->n, c->mean_bits)) * 0x1p-7f;
}

/* What the mean and the outliers of a group are.  Returns the square of the error beside `ordinary`,
 * the step without; none of both: a large number.  one_sign: of all values, and then there is a mean. */
GCK_SLOW_FN float gck_centre(gck_format format, const float *x, int one_sign, uint32_t ordinary, int pattern,
                             gck_centred *c, float *y)
{
    uint32_t kept[GCK_GROUP];
    gck_distances d;
    gck_outlier_choice choice;

    for (int i = 0; i < GCK_GROUP; i++) {
        kept[i] = ~0u;
    }
    c->n = 0;
    c->stored = 0;
    c->one_sign = one_sign;
    c->mean = gck_mean_of(x, kept);
    for (int pass = 0; pass < 2; pass++) {                       /* the mean of all, then of the rest */
        const int before = c->n;
        gck_measure(format, x, c->mean, &d);
        choice = gck_no_outlier(format, d.sum);
        for (int k = 1; k <= GCK_MOST_OUTLIERS && d.largest[k - 1] > 0; k++) {
            gck_consider(format, &choice, k, d.largest[k - 1]);
        }
        for (int k = 0; k < before; k++) {
            kept[c->at[k]] = ~0u;
        }
        c->n = choice.n;
        for (int k = 0; k < c->n; k++) {
            c->at[k] = d.at[k];
            kept[d.at[k]] = 0;
        }
        if (before == 0 && c->n == 0) {
            break;
        }
        c->mean = gck_mean_of(x, kept);
    }
    gck_settle_mean(c, choice.rest, d.scale);
    if (c->n == 0 && c->mean == 0.f) {
        return 0x1p100f;
    }
    return gck_settle_step(format, c, gck_rotate_centred(x, kept, c->mean, pattern, y), ordinary);
}

/* ---- the header ---- */

/* What comes before the outliers: some bits, the first ones lowest. */
typedef struct {
    int      n, mean_bits;
    float    mean;
    int      one_sign;
    uint32_t top;                            /* the exponent that is common to more than two */
    int      bits;
} gck_header_front;

/* A bit that says which, mantissa, exponent, sign, and whether it is that of all values. */
GCK_FN uint32_t gck_mean_field(const gck_centred *c)
{
    const int wide = c->mean_bits == GCK_WIDE_MEAN;
    const uint32_t exponent = (uint32_t)(gck_exponent(c->mean) - gck_mean_exponent(c->stored));
    const uint32_t signs = gck_bits(c->mean) >> 31 | (uint32_t)c->one_sign << 1;

    return wide ? 1u | (gck_bits(c->mean) >> 16 & 0x7Fu) << 1 | exponent << 8 | signs << 12
                : (gck_bits(c->mean) >> 20 & 7u) << 1 | exponent << 4 | signs << 7;
}

GCK_FN float gck_mean_of_field(uint32_t field, uint32_t stored, int *mean_bits, int *one_sign)
{
    const int wide = (int)(field & 1u);
    const uint32_t mantissa = wide ? (field >> 1 & 0x7Fu) << 16 : (field >> 1 & 7u) << 20;
    const int exponent = gck_mean_exponent(stored) + (int)(wide ? field >> 8 & 15u : field >> 4 & 7u);
    const uint32_t sign = (wide ? field >> 12 & 1u : field >> 7 & 1u) << 31;

    *mean_bits = wide ? GCK_WIDE_MEAN : GCK_NARROW_MEAN;
    *one_sign = (int)(wide ? field >> 13 & 1u : field >> 8 & 1u);
    return exponent <= 0 || exponent > 254 ? 0.f : gck_float(sign | (uint32_t)exponent << 23 | mantissa);
}

GCK_FN uint32_t gck_put_front(const gck_centred *c, uint32_t top, int *bits)
{
    uint32_t front = c->mean != 0.f ? gck_mean_field(c) : 0u;

    *bits = c->mean_bits;
    if (c->n > 0) {
        front = (uint32_t)(c->n - 1) | (c->mean != 0.f ? 8u : 0u) | front << 4;
        *bits += 4;
    }
    if (c->n > GCK_EXACT_OUTLIERS) {
        front |= top << *bits;
        *bits += 8;
    }
    return front;
}

GCK_FN gck_header_front gck_take_front(uint32_t bits, int has_outliers, uint32_t stored)
{
    gck_header_front f = {has_outliers ? (int)(bits & 7u) + 1 : 0, 0, 0.f, 0, 0u, has_outliers ? 4 : 0};

    if (!has_outliers || (bits & 8u)) {
        f.mean = gck_mean_of_field(bits >> f.bits, stored, &f.mean_bits, &f.one_sign);
        f.bits += f.mean_bits;
    }
    if (f.n > GCK_EXACT_OUTLIERS) {
        f.top = bits >> f.bits & 0xFFu;
        f.bits += 8;
    }
    return f;
}

/* An outlier of n, as the bits of a float32, and its field after the index; `top`: the exponent that is common
 * to more than two. */
GCK_FN int gck_outlier_bits(int n) { return n <= GCK_EXACT_OUTLIERS ? 32 : 12; }

GCK_FN uint32_t gck_outlier(int n, float v)
{
    return n <= GCK_EXACT_OUTLIERS ? gck_bits(v) : (uint32_t)gck_to_bf16(v) << 16;
}

GCK_FN uint32_t gck_outlier_field(int n, uint32_t bits, uint32_t top)
{
    const uint32_t lower = top - (bits >> 23 & 0xFFu);           /* 15: zero, or too small beside the largest */

    return n <= GCK_EXACT_OUTLIERS ? bits
        : (lower >= 15u ? 15u << 7 : (bits >> 16 & 0x7Fu) | lower << 7) | bits >> 31 << 11;
}

GCK_FN float gck_outlier_of_field(int n, uint32_t field, uint32_t top)
{
    const uint32_t lower = field >> 7 & 15u;

    return n <= GCK_EXACT_OUTLIERS ? gck_float(field)
        : gck_float(field >> 11 << 31
                    | (lower == 15u || lower > top ? 0u : (top - lower) << 23 | (field & 0x7Fu) << 16));
}

GCK_FN void gck_put_header(const gck_centred *c, const float *x, gck_header *h)
{
    uint32_t top = 0;
    int bits;

    for (int k = 0; k < c->n; k++) {
        const uint32_t exponent = gck_outlier(c->n, x[c->at[k]]) >> 23 & 0xFFu;
        top = exponent > top ? exponent : top;
    }
    const uint32_t front = gck_put_front(c, top, &bits);
    gck_put(h, front, bits);
    for (int k = 0; k < c->n; k++) {
        gck_put(h, c->at[k], 7);
        gck_put(h, gck_outlier_field(c->n, gck_outlier(c->n, x[c->at[k]]), top), gck_outlier_bits(c->n));
    }
}

/* ---- encode, decode ---- */

/* y: as gck_centre() left it.  Rounded to nearest: with stochastic rounding no group is centred. */
GCK_SLOW_FN void gck_encode_centred(gck_format format, const gck_centred *c, const float *x, const float *y,
                                    uint8_t *codes, uint16_t *side)
{
    gck_header h = {{0, 0, 0}, 0};
    const float inv = c->stored > 0 ? gck_inverse(format, 0, c->stored) : 0.f;
    const int beside = gck_bits_beside(format);
    uint8_t code[GCK_GROUP];

    gck_put_header(c, x, &h);
    gck_codes_of(format, y, c->stored, 0, inv, NULL, code);
    for (int b = beside; b < h.at; b++) {
        const int i = (b - beside) % GCK_GROUP, plane = (b - beside) / GCK_GROUP;
        code[i] = (uint8_t)((code[i] & ~(1 << plane)) | (int)gck_header_bit(&h, b) << plane);
    }
    gck_pack_codes(format, code, codes);
    gck_put_unusual(format, side, c->stored | (c->n > 0 ? GCK_HAS_OUTLIERS : 0u), (uint32_t)h.word[0] & 0xFFu);
}

GCK_SLOW_FN void gck_decode_centred(gck_format format, const uint8_t *codes, const uint16_t *side, int pattern, void *x,
                                    gck_dtype dtype, int count)
{
    gck_header h = {{gck_unusual_bits(format, side), 0, 0}, 0};
    const uint32_t stored = side[0] & 0x7FFCu;
    const int beside = gck_bits_beside(format);
    const int has_outliers = (side[0] & GCK_HAS_OUTLIERS) != 0, some = has_outliers ? GCK_HEADER_BITS : 16;
    int32_t value[GCK_GROUP];
    uint8_t code[GCK_GROUP];

    gck_unpack_codes(format, codes, code);
    for (int b = beside; b < some; b++) {
        const int i = (b - beside) % GCK_GROUP, plane = (b - beside) / GCK_GROUP;
        gck_set_header_bit(&h, b, (uint32_t)code[i] >> plane & 1u);
    }
    const gck_header_front f = gck_take_front(gck_take(&h, 32), has_outliers, stored);
    const int stolen = gck_header_bits(f.n, f.mean_bits) - beside;

    for (int i = 0; i < GCK_GROUP; i++) {
        value[i] = gck_coarse_value(format, code[i], 0);
    }
    for (int i = 0; i < stolen && i < GCK_GROUP; i++) {
        value[i] = gck_coarse_value(format, code[i], gck_stolen(stolen, i));
    }
    gck_unrotate(value, gck_float(stored << 16) * 0x1p-33f, f.mean, f.one_sign, pattern, x, dtype, count);
    h.at = f.bits;
    for (int k = 0; k < f.n; k++) {
        const int at = (int)gck_take(&h, 7);
        const float v = gck_outlier_of_field(f.n, gck_take(&h, gck_outlier_bits(f.n)), f.top);
        if (at < count) {
            gck_store(x, dtype, at, v);
        }
    }
}

#endif
