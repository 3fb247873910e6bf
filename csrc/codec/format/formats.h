/* formats.h: the formats of the group codecs and the numbers that tell them apart, from codecs.def. */
#ifndef GRADCKPT_FORMATS_H
#define GRADCKPT_FORMATS_H

#include "codec/format/float_bits.h"

typedef enum {
#define GCK_GROUP_CODEC(name, id, format, ...) format,
#include "codec/codecs.def"
    GCK_NFORMATS
} gck_format;

/* What group.h does not say in words. */
typedef struct {
    int   code_bits;
    int   side_words;            /* 16-bit words beside a group's codes: the scale, and int4's outlier */
    int   fp8;                   /* codes are OCP FP8 values; else integers or levels     */
    int   rotated;
    int   levels;                /* codes number levels, not multiples of a step          */
    /* amax maps to the top code: this is 2^32 / top in float32 (E5M2: 2^40; int4 in form A: 2^28,
     * or 1e30 would overflow); for y, which is 128 times as coarse, 2^25.  Noisy: nothing may lie
     * beyond the last level, or its rounding could not be unbiased. */
    float factor, factor_noisy, factor_escaped;
    int   dropped_bits;          /* of an ordinary step's mantissa: 16, and more where the word of the
                                  * scale also holds other fields                         */
    float unit, unit_escaped;    /* a stored step times this is the step                  */
    /* Form B: codes 0 .. 2 half are multiples of the step; then follow the five kinds of escapes,
     * or, where three bits have no room, the first three; then the table. */
    int   half, kinds, table;
    float table_factor;          /* amax times this is stored; 1e30 must not overflow     */
    float table_unit;            /* the square root of what undoes the power of two: two steps, so that
                                  * no intermediate underflows                            */
} gck_format_traits;

/* Of a constant format, all of it is folded away. */
GCK_LAYOUT_FN GCK_CONSTEXPR gck_format_traits gck_traits(gck_format format)
{
    switch (format) {
#define GCK_GROUP_CODEC(name, id, format, simd, cuda, summary, max_error, ...) \
    case format: {                                                            \
        const gck_format_traits traits = {__VA_ARGS__};                        \
        return traits;                                                         \
    }
#include "codec/codecs.def"
    default: {
        const gck_format_traits none = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
        return none;
    }
    }
}

GCK_LAYOUT_FN GCK_CONSTEXPR int gck_code_bits(gck_format format) { return gck_traits(format).code_bits; }
GCK_LAYOUT_FN GCK_CONSTEXPR int gck_side_words(gck_format format) { return gck_traits(format).side_words; }
GCK_LAYOUT_FN GCK_CONSTEXPR int gck_is_fp8(gck_format format) { return gck_traits(format).fp8; }
GCK_LAYOUT_FN GCK_CONSTEXPR int gck_is_rotated(gck_format format) { return gck_traits(format).rotated; }
GCK_LAYOUT_FN GCK_CONSTEXPR int gck_has_levels(gck_format format) { return gck_traits(format).levels; }

/* Bytes of a group's codes. */
GCK_LAYOUT_FN GCK_CONSTEXPR int gck_code_bytes(gck_format format) { return GCK_GROUP / 8 * gck_code_bits(format); }

#endif
