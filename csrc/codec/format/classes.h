/* classes.h: groups that are not rotated, whose values are of two classes, or some of which escape.
 *
 * group.h draws the forms. */
#ifndef GRADCKPT_CLASSES_H
#define GRADCKPT_CLASSES_H

#include "codec/format/escapes.h"
#include "codec/format/header.h"

/* What the codes of such a group mean: `levels` for the values near `centre`, then those of the far
 * class, then five kinds of escapes. */
typedef struct {
    gck_form form;
    int      kinds;              /* 5, or 0: no value escapes */
    int      near;               /* values of the near class  */
    int      top;                /* of the near class: 2 top + 1 levels */
    int      far_levels;
    float    centre, far, far_step;
    float    bound;              /* values on the far side of it are of the far class (plain: none) ... */
    int      above;              /* ... which lies above or below */
    uint32_t stored;             /* the step of the near class */
    float    up;                 /* 2^64 for tiny values, which are multiplied by it first; else 1 */
    int      sign;               /* of clusters: 1, -1 where all values have that sign; else 0 */
} gck_classes;

GCK_FN int gck_is_far(const gck_classes *c, float v)
{
    return c->above ? v > c->bound : v <= c->bound;
}

GCK_FN int gck_form_spare_bits(gck_form form)
{
    return form == GCK_FORM_PLAIN ? 0 : form == GCK_FORM_CLUSTERS ? 2 : 1;
}

GCK_FN int gck_far_levels(gck_format format, gck_form form, int kinds)
{
    const int bits = gck_code_bits(format);

    return form == GCK_FORM_PLAIN ? 0
        : form == GCK_FORM_SENTINEL || kinds > 0 ? 1
        : form == GCK_FORM_MASK ? (bits == 8 ? 4 : 2)
        : bits == 8 ? 64 : bits == 6 ? 16 : 4;
}

GCK_FN int gck_near_top(gck_format format, gck_form form, int kinds)
{
    return ((int)gck_alphabet(format, gck_form_spare_bits(form)) - gck_far_levels(format, form, kinds) - kinds - 1) / 2;
}

/* A form is taken for less than so much of the square of the error. */
#define GCK_BETTER 0.94f
#define GCK_ANY 0x1p99f          /* for any there is */

/* ---- what a group's values are ---- */

typedef struct {
    int   n, escapes, others;    /* finite values; the rest; those of them that need form B */
    float low, high, inner_low, inner_high;      /* ends of the lower class and of the upper: see below */
    int   lower;                 /* how many belong to the lower class */
} gck_extent;

/* 1 or -1 where no value has another sign, else 0. */
GCK_FN int gck_sign_of_all(const gck_extent *e) { return e->low >= 0.f ? 1 : e->high <= 0.f ? -1 : 0; }

/* Of 64 equal parts of the range, the place of v. */
GCK_FN int gck_place(float low, float scale, float v)
{
    const int place = (int)((v - low) * scale);

    return place - (place > 63);
}

/* The last place of the lower class, of the places that have values: 0 is one. */
GCK_FN int gck_last_of_lower(uint64_t used)
{
    uint64_t rows = ~used, longer;               /* where rows of `length` places without a value begin */
    int length = 1;

    if ((used & ~(uint64_t)1) == 0 || rows == 0) {
        return 0;
    }
    for (; (longer = rows & rows >> length) != 0; length *= 2) {
        rows = longer;
    }
    for (length /= 2; length > 0; length /= 2) {
        longer = rows & rows >> length;
        rows = longer != 0 ? longer : rows;
    }
    return gck_lowest_bit(rows) - 1;
}

/* v: the values, whose bits without the sign are beyond `limit` where they escape.  low .. inner_low is
 * the lower class, inner_high .. high the upper one: between them lies the longest row of 64 equal parts
 * of the range without a value, the first of several. */
GCK_SLOW_FN gck_extent gck_extent_of(const float *v, uint32_t limit, uint32_t max)
{
    gck_extent e = {0, 0, 0, 0.f, 0.f, 0.f, 0.f, 0};
    int32_t low = INT32_MAX, high = INT32_MIN, inner_low = INT32_MIN, inner_high = INT32_MAX;
    int32_t place[GCK_GROUP], key[GCK_GROUP], escapes = 0, others = 0, lower = 0;
    uint64_t used = 0;

    for (int i = 0; i < GCK_GROUP; i++) {                            /* no branches: compilers use vectors */
        const int32_t abs = (int32_t)(gck_bits(v[i]) & 0x7FFFFFFFu), escape = -(abs > (int32_t)limit);
        key[i] = gck_key(v[i] + 0.f);                            /* one zero */
        const int32_t least = key[i] ^ ((key[i] ^ INT32_MAX) & escape), most = key[i] ^ ((key[i] ^ INT32_MIN) & escape);
        low = least < low ? least : low;
        high = most > high ? most : high;
        escapes -= escape;
        others -= escape & -(abs < 0x7F800000) & -(abs != (int32_t)max);
    }
    e.escapes = escapes;
    e.others = others;
    e.n = GCK_GROUP - escapes;
    if (e.n == 0) {
        return e;
    }
    e.low = gck_of_key(low);
    e.high = gck_of_key(high);
    const float range = e.high - e.low, scale = range >= GCK_TINY ? 64.f / range : 0.f;
    for (int i = 0; i < GCK_GROUP; i++) {
        const int32_t abs = (int32_t)(gck_bits(v[i]) & 0x7FFFFFFFu);
        const int32_t escape = -(abs > (int32_t)limit);
        const float finite = gck_float((gck_bits(v[i]) & ~(uint32_t)escape) | (gck_bits(e.low) & (uint32_t)escape));
        place[i] = (gck_place(e.low, scale, finite) & ~escape) | (64 & escape);
    }
    for (int i = 0; i < GCK_GROUP; i++) {
        used |= (uint64_t)(place[i] < 64) << (place[i] & 63);
    }
    const int32_t last = gck_last_of_lower(used);
    for (int i = 0; i < GCK_GROUP; i++) {
        const int32_t is_lower = -(place[i] <= last), is_upper = ~is_lower & -(place[i] < 64);
        const int32_t least = key[i] ^ ((key[i] ^ INT32_MAX) & ~is_upper);
        const int32_t most = key[i] ^ ((key[i] ^ INT32_MIN) & ~is_lower);
        lower -= is_lower;
        inner_low = most > inner_low ? most : inner_low;
        inner_high = least < inner_high ? least : inner_high;
    }
    e.lower = lower;
    e.inner_low = gck_of_key(inner_low);
    e.inner_high = e.lower < e.n ? gck_of_key(inner_high) : e.high;
    return e;
}

/* ---- steps ---- */

GCK_FN void gck_set_near(gck_format format, gck_classes *c, float amax)
{
    c->top = gck_near_top(format, c->form, c->kinds);
    c->up = c->form == GCK_FORM_PLAIN && amax < GCK_TINY ? 0x1p64f : 1.f;
    const float factor = 1.f / gck_unit_escaped(format) / (float)c->top;
    c->stored = amax > 0.f ? gck_stored_unusual(amax * c->up * factor, 19) : 0u;
}

GCK_FN float gck_max_of(float a, float b) { return a > b ? a : b; }

/* The square of a step beside that of an ordinary rotated group. */
GCK_FN float gck_beside(float step, uint32_t ordinary)
{
    const float ratio = step / (gck_float(ordinary << 16) * 0x1p-32f);

    return ratio * ratio;
}

/* The near class is `near_low` .. `near_high`, the far one `far_low` .. `far_high` with `nfar` values.
 * Returns the square of the error beside that of an ordinary rotated group. */
GCK_FN float gck_set_classes(gck_format format, gck_form form, const gck_extent *e, int far_above, uint32_t ordinary,
                             int noisy, gck_classes *c)
{
    const float far_low = far_above ? e->inner_high : e->low, far_high = far_above ? e->high : e->inner_low;
    const float near_low = far_above ? e->low : e->inner_high, near_high = far_above ? e->inner_low : e->high;
    const int lower = e->lower, nfar = far_above ? e->n - lower : lower, near = e->n - nfar;
    float amax = 0.f;

    c->form = form;
    c->kinds = e->escapes > 0 ? 5 : 0;
    c->near = near;
    c->above = far_above;
    c->bound = e->inner_low;
    c->far_levels = gck_far_levels(format, form, c->kinds);
    /* The first level is the end that is nearer to zero, where values are repeated; of a mask, the lower one. */
    const int from_low = form == GCK_FORM_MASK || gck_abs(far_low) <= gck_abs(far_high);
    c->far = form == GCK_FORM_MASK ? gck_float((gck_bits(far_low) + 0xFFu) & ~0xFFu) : from_low ? far_low : far_high;
    const float reach = from_low ? far_high - c->far : c->far - far_low;
    const float step = c->far_levels == 1 || reach < GCK_LEAST ? 0.f : reach / (float)(c->far_levels - 1);
    const uint32_t dropped = form == GCK_FORM_MASK ? 0x7FFFFFu : 0x7FFFFu;
    c->far_step = gck_float(((gck_bits(step) + dropped) & ~dropped) | (from_low ? 0u : 0x80000000u));
    c->centre = 0.f;
    c->sign = form == GCK_FORM_CLUSTERS && !noisy ? gck_sign_of_all(e) : 0;
    if (near > 0) {
        if (form == GCK_FORM_CLUSTERS) {
            c->centre = gck_float((uint32_t)gck_to_bf16(0.5f * near_low + 0.5f * near_high) << 16);
        }
        amax = gck_max_of(gck_abs(near_low - c->centre), gck_abs(near_high - c->centre));
        amax = amax < GCK_LEAST ? 0.f : amax;
    }
    gck_set_near(format, c, amax);
    if (ordinary == 0) {
        return 0.f;
    }
    const float a = gck_beside(amax / (float)c->top, ordinary);
    const float b = form == GCK_FORM_CLUSTERS ? gck_beside(c->far_step, ordinary) : 0.f;
    return ((float)near * a + (float)nfar * b) / ((float)(GCK_GROUP * e->n) * gck_cell_noise(format));
}

/* The best form for two classes that lie apart.  Returns the square of its error beside that of an
 * ordinary rotated group; 2^100 where they do not lie apart.  noisy: nothing may be biased. */
GCK_FN float gck_classify(gck_format format, const gck_extent *e, uint32_t ordinary, int noisy, gck_classes *c)
{
    const float lower = e->inner_low - e->low, upper = e->high - e->inner_high, gap = e->inner_high - e->inner_low;
    const int constant = lower == 0.f || upper == 0.f;
    const int mask = !noisy && e->inner_low <= -64.f && 8.f * lower <= gap
        && (2.f * lower <= 3.f * upper || 2 * e->lower >= e->n);
    gck_classes other;

    if (e->n == 0 || (e->lower < e->n && gap <= 0.f)) {
        return 0x1p100f;
    }
    if (e->escapes > 0 && !constant) {
        return 0x1p100f;
    }
    if (!constant) {
        if (mask) {
            return gck_set_classes(format, GCK_FORM_MASK, e, 0, ordinary, noisy, c);
        }
        const float error = gck_set_classes(format, GCK_FORM_CLUSTERS, e, upper < lower, ordinary, noisy, c);
        return 2.f * gap >= gck_max_of(lower, upper) ? 0.5f * error : error;     /* for the smaller one's sake */
    }
    /* The class of one value is the far one; of two such, that of the larger value, unless it is alone and
     * the other is not zero. */
    const int larger = gck_abs(e->high) > gck_abs(e->low), alone = (larger ? e->n - e->lower : e->lower) == 1;
    const int other_way = alone && e->n > 2 && (larger ? e->low : e->high) != 0.f;
    const int above = lower != 0.f ? 1 : upper != 0.f ? 0 : larger ^ other_way;
    const float clusters = gck_set_classes(format, GCK_FORM_CLUSTERS, e, above, ordinary, noisy, c);
    if (e->escapes > 0) {
        return clusters;
    }
    const float sentinel = gck_set_classes(format, GCK_FORM_SENTINEL, e, above, ordinary, noisy, &other);
    const int repeated = (above ? e->n - e->lower : e->lower) > 1 && gap >= gck_max_of(lower, upper);
    if (sentinel <= clusters) {
        *c = other;
    }
    const float least = sentinel <= clusters ? sentinel : clusters;
    return repeated && least < GCK_BETTER ? 0.f : least;         /* comes back bit for bit */
}

/* ---- encode ---- */

/* The code of v; any code if it escapes. */
GCK_HOT_FN int gck_class_code(const gck_classes *c, float v, uint32_t limit, float inv, float far_inv, int noise)
{
    const int is_far = gck_is_far(c, v), is_near = !is_far & ((gck_bits(v) & 0x7FFFFFFFu) <= limit);
    const float z = is_near ? (v - c->centre) * c->up : 0.f;
    const float round = noise < 0 ? 0.5f : gck_uniform(noise);
    const int code = noise < 0 ? gck_round_product(z, inv) : gck_round_noisy(z, inv, noise, c->top);
    const int near = code > c->top ? c->top : code < -c->top ? -c->top : code;
    const float level = (v - c->far) * far_inv + round, last = (float)(c->far_levels - 1);
    const float far = level > last ? last : level > 0.f ? level : 0.f;           /* then towards zero: down */

    return is_far ? 2 * c->top + 1 + (int)far : c->top + near;
}

/* The code of an escape. */
GCK_FN int gck_kind_code(const gck_classes *c, float v, gck_dtype dtype)
{
    return 2 * c->top + 1 + c->far_levels + gck_escape_kind(v, dtype);
}

GCK_FN uint32_t gck_class_scale(const gck_classes *c)
{
    return (c->stored > 0 ? c->stored - (c->up > 1.f ? 64u * 128u : 0u) : 0u) | gck_form_bits(c->form);
}

/* Of a plain group: nothing is taken from it. */
GCK_FN uint64_t gck_class_header(const gck_classes *c)
{
    const uint64_t far = gck_bits(c->far);

    return c->form == GCK_FORM_PLAIN ? 0u
        : c->form == GCK_FORM_SENTINEL ? far
        : c->form == GCK_FORM_MASK ? far >> 8 | (uint64_t)(gck_bits(c->far_step) >> 23) << 24
        : far | (uint64_t)(gck_bits(c->far_step) >> 19 & 0xFFFu) << 32 | (uint64_t)(gck_bits(c->centre) >> 16) << 44
            | (uint64_t)(c->kinds > 0) << 60 | (uint64_t)(gck_bits(c->far_step) >> 31) << 61
            | (uint64_t)(c->sign & 3) << 62;
}

GCK_HOT_FN void gck_put_classes(gck_format format, int spare, const uint8_t *code, uint64_t header, uint8_t *codes)
{
    for (int number = 0; number < GCK_GROUP / 4; number++) {
        gck_put_four(format, spare, code + 4 * number, (uint32_t)(header >> (spare * number)) & ((1u << spare) - 1u),
                     number, codes);
    }
}

GCK_SLOW_FN void gck_encode_classes(gck_format format, const gck_classes *of, const float *x, gck_dtype dtype,
                                    const uint16_t *noise, uint8_t *codes, uint16_t *side)
{
    const gck_classes c = *of;
    const float inv = c.stored > 0 ? gck_inverse(format, 1, c.stored) : 0.f;
    const float far_inv = c.far_step != 0.f ? 1.f / c.far_step : 0.f;
    const uint64_t header = gck_class_header(&c);
    const uint32_t limit = gck_limit(dtype);
    uint8_t code[GCK_GROUP];

    if (noise == NULL) {
        for (int i = 0; i < GCK_GROUP; i++) {
            code[i] = (uint8_t)gck_class_code(&c, x[i], limit, inv, far_inv, GCK_NEAREST);
        }
    } else {
        for (int i = 0; i < GCK_GROUP; i++) {
            code[i] = (uint8_t)gck_class_code(&c, x[i], limit, inv, far_inv, noise[i]);
        }
    }
    for (int i = 0; i < GCK_GROUP && c.kinds > 0; i++) {
        if (gck_escapes(x[i], dtype)) {
            code[i] = (uint8_t)gck_kind_code(&c, x[i], dtype);
        }
    }
    switch (gck_form_spare_bits(c.form)) {
    case 0:  gck_put_classes(format, 0, code, header, codes); break;
    case 1:  gck_put_classes(format, 1, code, header, codes); break;
    default: gck_put_classes(format, 2, code, header, codes);
    }
    gck_put_unusual(format, side, gck_class_scale(&c), 0u);
}

/* A group with escapes, or a tiny one: its classes, if they lie apart, else one for all.  apart, c: of
 * gck_classify(); amax: of what does not escape. */
GCK_FN void gck_choose_unrotated(gck_format format, const gck_extent *e, float apart, float amax, gck_classes *c)
{
    gck_classes plain = {GCK_FORM_PLAIN, 5, 0, 0, 0, 0.f, 0.f, 0.f, gck_float(0x7F800000u), 1, 0u, 1.f, 0};

    gck_set_near(format, &plain, amax);
    if (!(e->escapes > 0 && amax >= GCK_TINY && apart == 0.f && c->stored < plain.stored)) {
        *c = plain;
    }
}

GCK_SLOW_FN void gck_encode_unrotated_form(gck_format format, const void *x, int count, const float *values,
                                           gck_dtype dtype, const uint16_t *noise, uint8_t *codes, uint16_t *side)
{
    const gck_extent e = gck_extent_of(values, gck_limit(dtype), gck_bits(gck_max_value(dtype)));
    const float amax = gck_max_of(gck_abs(e.low), gck_abs(e.high));
    gck_classes c = {GCK_FORM_PLAIN, 0, 0, 0, 0, 0.f, 0.f, 0.f, 0.f, 0, 0u, 1.f, 0};

    if (e.others > 0) {
        gck_encode_table(format, x, dtype, count, amax, codes);
        gck_put_unusual(format, side, GCK_ESC_TABLE, 0u);
        return;
    }
    gck_choose_unrotated(format, &e, gck_classify(format, &e, 0u, noise != NULL, &c), amax, &c);
    gck_encode_classes(format, &c, values, dtype, noise, codes, side);
}

/* ---- decode ---- */

/* The 128 codes of a group; returns the header. */
GCK_HOT_FN uint64_t gck_take_classes(gck_format format, int spare, const uint8_t *codes, uint8_t *code)
{
    const uint32_t q = gck_alphabet(format, spare);
    const int bits = 4 * gck_code_bits(format);
    uint32_t four[GCK_GROUP / 4];
    uint64_t header = 0;

    for (int number = 0; number < GCK_GROUP / 4; number++) {
        four[number] = gck_number_of(format, codes, number);
    }
    for (int number = 0; number < GCK_GROUP / 4 && spare > 0; number++) {
        header |= (uint64_t)(four[number] >> (bits - spare)) << (spare * number);
        four[number] &= (1u << (bits - spare)) - 1u;
    }
    for (int k = 0; k < 4; k++) {                  /* a loop that compilers make vectors of */
        for (int number = 0; number < GCK_GROUP / 4; number++) {
            const uint32_t over = four[number] / q;
            code[4 * number + k] = (uint8_t)(four[number] - over * q);
            four[number] = over;
        }
    }
    return header;
}

/* What a scale and a header say. */
GCK_FN gck_classes gck_classes_of(gck_format format, uint32_t scale, uint64_t header)
{
    const gck_form form = gck_form_of(scale);
    const int clusters = form == GCK_FORM_CLUSTERS, mask = form == GCK_FORM_MASK;
    const int kinds = form == GCK_FORM_PLAIN || (clusters && (header >> 60 & 1u)) ? 5 : 0;
    const uint32_t step = (uint32_t)(header >> 32 & 0xFFFu) << 19 | (uint32_t)(header >> 61 & 1u) << 31;
    const uint32_t far_step = mask ? (uint32_t)(header >> 24 & 0xFFu) << 23 : clusters ? step : 0u;
    const gck_classes c = {
        form, kinds, 0, gck_near_top(format, form, kinds), gck_far_levels(format, form, kinds),
        clusters ? gck_float((uint32_t)(header >> 44 & 0xFFFFu) << 16) : 0.f,
        gck_float(mask ? (uint32_t)header << 8 : (uint32_t)header), gck_float(far_step), 0.f, 0, scale & 0x7FF8u, 1.f,
        clusters ? ((int)(header >> 62) ^ 2) - 2 : 0,
    };

    return c;
}

/* Of a code: the kind of escape that it means, or less than 0. */
GCK_FN int gck_kind_of_code(const gck_classes *c, int code)
{
    const int kind = code - (2 * c->top + 1) - c->far_levels;

    return c->kinds == 0 ? -1 : kind < 5 ? kind : 0;
}

/* The value that any other code means. */
GCK_HOT_FN float gck_class_value(gck_format format, const gck_classes *c, int code)
{
    const int levels = 2 * c->top + 1;
    const float near = gck_times_step(format, (float)(code - c->top), c->stored);
    const float other = c->far + (float)(code - levels) * c->far_step;

    const float moved = near + c->centre;

    return code >= levels ? other : c->form != GCK_FORM_CLUSTERS ? near
        : c->sign != 0 && (moved < 0.f) != (c->sign < 0) ? 0.f : moved;
}

GCK_SLOW_FN void gck_decode_classes(gck_format format, const uint8_t *codes, const uint16_t *side, void *x,
                                    gck_dtype dtype, int count)
{
    const int spare = gck_form_spare_bits(gck_form_of(side[0]));
    uint8_t code[GCK_GROUP];
    float v[GCK_GROUP];
    const uint64_t header = spare == 0 ? gck_take_classes(format, 0, codes, code)
        : spare == 1 ? gck_take_classes(format, 1, codes, code) : gck_take_classes(format, 2, codes, code);
    const gck_classes c = gck_classes_of(format, side[0], header);

    for (int i = 0; i < GCK_GROUP; i++) {
        v[i] = gck_class_value(format, &c, code[i]);
    }
    for (int i = 0; i < count; i++) {
        gck_store(x, dtype, i, v[i]);
    }
    for (int i = 0; i < count && c.kinds > 0; i++) {
        const int kind = gck_kind_of_code(&c, code[i]);
        if (kind >= 0) {
            gck_store_escape(x, dtype, i, gck_escape_value(kind, dtype));
        }
    }
}

#endif
