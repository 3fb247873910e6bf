/* rows.h: rows that do not end with a group.
 *
 * Where the length of the rows is no multiple of 128 (gck_row()), a group holds the end of one row and the
 * beginning of the next.  Its *shares*, the values of one row each, at most three, may differ in size: they
 * would get the step of the largest.  So a share is multiplied by 2^shift before the group is encoded, and by
 * 2^-shift after it was decoded; both in the dtype, the second rounded to nearest even.
 *
 *     int8_t row[r];   of r rows, beside the scales: the shift of the row's first share, less that of the
 *                      share before it in the group; 0 where the row begins a group.  The least shift of a
 *                      group is 0.
 *
 * A key is the exponent of a float32 and 3 bits of its mantissa.  The level of a share is the key of its
 * largest value, but for
 *     outliers: the largest sixteenth of the values that are not zero does not count;
 *     masks: nor do values above a gap: there are none between 1/16 and 3/4 of the level, but below (of less
 *     than eight that are not zero, where that may be chance: between 2^-10 and 3/4).
 * A share reaches the level that it has when the key of its largest value is one less than that of the group's:
 * so no value escapes that did not.  A shift is the whole number of octaves by which the share's level lies below
 * one that all shares have or reach: the highest, or the lowest reach; 0 for shares of zeros, and in a group with
 * escapes. */
#ifndef GRADCKPT_ROWS_H
#define GRADCKPT_ROWS_H

#include "codec/format/float_bits.h"
#include "gradckpt.h"

enum {
    GCK_SHARES = 3,              /* of a group, at most */
    GCK_KEY_SHIFT = 20, GCK_KEY_OCTAVE = 8, GCK_KEY_BITS = 11,
    GCK_KEY_GAP = 4 * GCK_KEY_OCTAVE, GCK_KEY_WIDE_GAP = 10 * GCK_KEY_OCTAVE, GCK_KEY_NEAR = 4,
    GCK_FEW_IN_SHARE = 8,
    GCK_KEY_FAR = 16,
    GCK_MOST_GAPS = 2,
    GCK_MOST_SHIFT = 120,
    GCK_ROW_OUTLIERS = 16,       /* one of so many values may be one: of a group at most eight */
};

GCK_FN int gck_magnitude_key(float x) { return (int)(gck_bits(x) >> GCK_KEY_SHIFT & 0x7FFu); }

GCK_FN int gck_row_outliers(int not_zero) { return not_zero / GCK_ROW_OUTLIERS; }

GCK_FN int gck_row_gap(int not_zero) { return not_zero < GCK_FEW_IN_SHARE ? GCK_KEY_WIDE_GAP : GCK_KEY_GAP; }

/* The shares of group g in a tensor of such rows: share s ends before value end[s] of the group.  Their number;
 * *row: the one that share 0 is of. */
GCK_FN int gck_shares_of(int64_t g, int64_t length, int64_t numel, int *end, int64_t *row)
{
    const int64_t first = g * GCK_GROUP, left = numel - first;
    const int count = left < GCK_GROUP ? (int)left : GCK_GROUP;
    int n = 0;

    *row = first / length;
    for (int64_t next = (*row + 1) * length - first; next < count; next += length) {
        end[n++] = (int)next;
    }
    end[n++] = count;
    return n;
}

/* From the levels and the largest keys of n shares. */
GCK_FN void gck_shifts_of(int n, const int *level, const int *largest, int *shift)
{
    int common = 0, most = 0;

    for (int s = 0; s < n; s++) {
        common = level[s] > common ? level[s] : common;
        most = largest[s] > most ? largest[s] : most;
    }
    for (int s = 0; s < n; s++) {
        const int reach = level[s] + (most > largest[s] ? most - largest[s] - 1 : 0);
        common = level[s] > 0 && reach < common ? reach : common;
    }
    for (int s = 0; s < n; s++) {
        const int wanted = (common - level[s]) / GCK_KEY_OCTAVE;
        shift[s] = level[s] == 0 || wanted < 0 ? 0 : wanted < GCK_MOST_SHIFT ? wanted : GCK_MOST_SHIFT;
    }
    const int least = n < 2 || shift[0] < shift[1] ? shift[0] : shift[1];
    const int base = n > 2 && shift[2] < least ? shift[2] : least;
    for (int s = 0; s < n; s++) {
        shift[s] -= base;
    }
}

/* The shifts of a group's shares from the bytes of the rows that begin in it. */
GCK_FN void gck_shifts_from(int n, const int8_t *rows, int *shift)
{
    int least = 0;

    shift[0] = 0;
    for (int s = 1; s < n; s++) {
        shift[s] = shift[s - 1] + rows[s - 1];
        least = shift[s] < least ? shift[s] : least;
    }
    for (int s = 0; s < n; s++) {
        shift[s] -= least;
    }
}

/* 2^shift and 2^-shift; at most 126 is used of what a foreign payload may say. */
GCK_FN float gck_two_to(int shift) { return gck_float((uint32_t)(127 + (shift < 126 ? shift : 126)) << 23); }
GCK_FN float gck_two_to_minus(int shift) { return gck_float((uint32_t)(127 - (shift < 126 ? shift : 126)) << 23); }

/* ---- the reference ---- */

/* The magnitudes of n values as float32 bits. */
GCK_HOT_FN void gck_load_magnitudes(const void *x, gck_dtype dtype, int n, uint32_t *bits)
{
    switch (dtype) {
    case GCK_F16:
        for (int i = 0; i < n; i++) {
            const uint32_t rest = ((const uint16_t *)x)[i] & 0x7FFFu;
            const uint32_t finite = gck_bits(gck_float(rest << 13) * 0x1p112f);
            bits[i] = rest >= 0x7C00u ? 0x7F800000u : finite;
        }
        break;
    case GCK_BF16:
        for (int i = 0; i < n; i++) {
            bits[i] = (uint32_t)(((const uint16_t *)x)[i] & 0x7FFFu) << 16;
        }
        break;
    default:
        for (int i = 0; i < n; i++) {
            bits[i] = gck_bits(((const float *)x)[i]) & 0x7FFFFFFFu;
        }
    }
}

/* The keys of a share; behind them zeros, which count for nothing.  Loops over all of them are vectors to
 * compilers. */
typedef struct {
    int16_t key[GCK_GROUP];
} gck_share_keys;

/* How many keys are at least `from`, which is above 0. */
GCK_HOT_FN int gck_count_keys(const gck_share_keys *s, int from)
{
    const int16_t least = (int16_t)from;
    int16_t count = 0;

    for (int i = 0; i < GCK_GROUP; i++) {
        count = (int16_t)(count + (s->key[i] >= least));
    }
    return count;
}

/* The largest key below `end`. */
GCK_HOT_FN int gck_largest_key(const gck_share_keys *s, int end)
{
    const int16_t above = (int16_t)end;
    int16_t largest = 0;

    for (int i = 0; i < GCK_GROUP; i++) {
        const int16_t key = s->key[i] < above ? s->key[i] : 0;
        largest = key > largest ? key : largest;
    }
    return largest;
}

/* The level of a share. */
GCK_FN int gck_share_level(const gck_share_keys *s, int largest)
{
    const int not_zero = gck_count_keys(s, 1), above = gck_row_outliers(not_zero), gap = gck_row_gap(not_zero);
    int level = 0, bit = 1 << (GCK_KEY_BITS - 1);

    if (largest >= GCK_KEY_FAR && gck_count_keys(s, largest - GCK_KEY_FAR + 1) > above) {
        level = largest - GCK_KEY_FAR + 1, bit = GCK_KEY_FAR / 2;      /* faster: it is hardly ever lower */
    }
    for (; bit > 0; bit /= 2) {                    /* the largest with `above` + 1 keys from it on */
        level += gck_count_keys(s, level + bit) > above ? bit : 0;
    }
    for (int gaps = 0; gaps < GCK_MOST_GAPS; gaps++) {
        const int below = gck_largest_key(s, level - GCK_KEY_NEAR);
        const int under = below >= level - gap ? 0 : below;
        if (under == 0) {
            break;
        }
        level = under;
    }
    return level;
}

/* The shifts of a group's n shares; 1 when one is not 0. */
GCK_FN int gck_find_shifts(const void *x, gck_dtype dtype, int n, const int *end, int *shift)
{
    const uint32_t limit = gck_limit(dtype);
    uint32_t bits[GCK_GROUP];
    int level[GCK_SHARES], largest[GCK_SHARES], special = 0, any = 0;

    gck_load_magnitudes(x, dtype, end[n - 1], bits);
    for (int i = 0; i < end[n - 1]; i++) {
        special |= bits[i] > limit;
    }
    for (int s = 0; s < n; s++) {
        const int first = s > 0 ? end[s - 1] : 0;
        gck_share_keys share = {{0}};
        for (int i = first; i < end[s]; i++) {
            share.key[i - first] = (int16_t)(bits[i] >> GCK_KEY_SHIFT);
        }
        largest[s] = gck_largest_key(&share, 1 << GCK_KEY_BITS);
        level[s] = special ? 0 : gck_share_level(&share, largest[s]);
    }
    gck_shifts_of(n, level, largest, shift);
    for (int s = 0; s < n; s++) {
        any |= shift[s];
    }
    return any != 0;
}

/* Multiply the shares by 2^shift, or 2^-shift. */
GCK_FN void gck_scale_shares(void *x, gck_dtype dtype, int n, const int *end, const int *shift, int back)
{
    for (int s = 0; s < n; s++) {
        const float by = back ? gck_two_to_minus(shift[s]) : gck_two_to(shift[s]);
        for (int i = s > 0 ? end[s - 1] : 0; i < end[s] && shift[s] != 0; i++) {
            const float v = gck_load(x, dtype, i) * by;
            if (back && (gck_bits(v) & 0x7FFFFFFFu) > gck_limit(dtype)) {
                continue;                                  /* of no payload that this encoder wrote */
            }
            gck_store(x, dtype, i, v);
        }
    }
}

#endif
