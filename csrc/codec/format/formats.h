/* formats.h: the formats of the group codecs and the numbers that tell them apart, from
 * codecs.h. */
#ifndef GRADCKPT_FORMATS_H
#define GRADCKPT_FORMATS_H

#include "codec/format/codecs.h"
#include "codec/format/float_bits.h"

#define GCK_FORMAT(_, name, id, format, ...) format,
typedef enum { GCK_GROUP_CODECS(GCK_FORMAT, _) GCK_NFORMATS } gck_format;

/* The numbers of a row. */
typedef struct {
    int   code_bits;
    int   side_words;            /* 16-bit words beside a group's codes: the scale, and int4's outlier */
    int   scales_rows;           /* rows that end within a group are scaled apart (rows.h), which floating codes
                                  * do not need */
    int   is_fp8;                /* codes are OCP FP8 values; else integers or levels     */
    int   is_rotated;
    int   has_levels;            /* codes number levels, not multiples of a step          */
    /* amax maps to the top code: this is 2^32 / top (E5M2: 2^40; int4 in form A: 2^28, or 1e30
     * would overflow); for y, which is 128 times as coarse, 2^25.  Noisy: nothing may lie beyond
     * the last level, or its rounding could not be unbiased.  The constants are written out, so
     * that no compiler divides doubles on a device. */
    float factor, factor_noisy, factor_escaped;
    int   ordinary_dropped_bits; /* bits of an ordinary step's mantissa that are dropped: 16, and more
                                  * where the word of the scale also holds other fields   */
    float unit, unit_escaped;    /* a stored step times this is the step                  */
    /* Form B: codes 0 .. 2 half are multiples of the step; then follow the five kinds of escapes,
     * or, where three bits have no room, the first three; then the table. */
    int   table_half, table_kinds, table_size;
    float table_factor;          /* amax times this is stored; 1e30 must not overflow     */
    float table_unit;            /* the square root of what undoes the power of two in it: two steps, so
                                  * that no intermediate underflows                       */
} gck_format_numbers;

/* One function for each: comparisons with constants, which compilers fold where the format is known,
 * or known to be one of a few (nvcc folds no switch there, and its kernels took more registers). */
#define GCK_NUMBER_OF_ROW(field, name, id, of, simd, cuda, bits, words, rows, summary, error, ...)           \
    if (format == of) {                                                                                     \
        const gck_format_numbers numbers = {                                                                \
            .code_bits = bits, .side_words = words, .scales_rows = rows, __VA_ARGS__                        \
        };                                                                                                  \
        return numbers.field;                                                                               \
    }
#define GCK_NUMBER(type, field)                                     \
    GCK_LAYOUT_FN GCK_CONSTEXPR type gck_##field(gck_format format) \
    {                                                               \
        GCK_GROUP_CODECS(GCK_NUMBER_OF_ROW, field)                  \
        return 0;                                                   \
    }
GCK_NUMBER(int, code_bits)
GCK_NUMBER(int, side_words)
GCK_NUMBER(int, scales_rows)
GCK_NUMBER(int, is_fp8)
GCK_NUMBER(int, is_rotated)
GCK_NUMBER(int, has_levels)
GCK_NUMBER(float, factor)
GCK_NUMBER(float, factor_noisy)
GCK_NUMBER(float, factor_escaped)
GCK_NUMBER(int, ordinary_dropped_bits)
GCK_NUMBER(float, unit)
GCK_NUMBER(float, unit_escaped)
GCK_NUMBER(int, table_half)
GCK_NUMBER(int, table_kinds)
GCK_NUMBER(int, table_size)
GCK_NUMBER(float, table_factor)
GCK_NUMBER(float, table_unit)

/* Bytes of a group's codes. */
GCK_LAYOUT_FN GCK_CONSTEXPR int gck_code_bytes(gck_format format) { return GCK_GROUP / 8 * gck_code_bits(format); }

#endif
