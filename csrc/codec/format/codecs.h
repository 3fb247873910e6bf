/* codecs.h: every codec, one row each: GCK_CODECS(CODEC, GROUP, ARG) calls one of two macros for
 * each, and hands ARG on.
 *
 * The id names the bytes: it is stored beside a payload, and codecs.info() takes it.  Never reuse one: where the
 * bytes of a codec change, it gets another, and gradckpt/_codec_names.py keeps the old one (3, 4, 5, 6).
 *
 * CODEC(ARG, name, id): gck_codec_<name> describes it, in host/<name>.c.
 *
 * GROUP(ARG, name, id, ...): groups of 128 values, as format/group.h draws them.  This row is its
 * whole description: the enum of formats, their numbers, the codec and the tables of kernels come
 * from it.  By their places:
 *     format         its name in C
 *     simd, cuda     SIMD: x86/ has kernels for every instruction set, or PORTABLE: it has none;
 *                    CUDA: cuda/ has kernels, or NO_CUDA
 *     code bits, side words, rows   what the size of a payload depends on: see format/formats.h
 *     summary        one line for the user
 *     max_error      the stated bound |x - x'| / absmax of x's group, see below
 * then by name, all of them and in this order (C++ reads them, too), the other numbers of format/formats.h.
 *
 * Two that few will choose stay.  fp8_e5m2: groups that span more than five decades, and the bytes of other
 * software.  int8_plain: the fastest for values without outliers; sparse_int8 stores its values by it.
 *
 * Stated errors.  fp8: half a step of the top binade, over amax; a group with escapes maps amax to
 * a lower code, which is the worse case for E4M3.  int8_plain: half a step of a group with escapes,
 * amax / 250, plus the rounding of the scale; amax / 118 in the rare form B, which trades a bit for
 * exact sentinels.  Rotated: the worst case over all inputs, when every error of a group adds up at
 * one value.  Their root mean square is what matters, and it is at most |x| / 254 of the group's
 * Euclidean norm for int8 (see docs/codecs.md).  The error of a code is at most half a step for
 * int8 (a whole one for the coarser codes of an outlier group), 4.5 steps for int6 and 13 for int4, of 127. */
#ifndef GRADCKPT_CODECS_H
#define GRADCKPT_CODECS_H

#define GCK_CODECS(CODEC, GROUP, ARG)                                                                                 \
    CODEC(ARG, raw, 0)                                                                                                \
    GROUP(ARG, fp8_e4m3, 1, GCK_E4M3, SIMD, CUDA, 8, 1, 0,                                                            \
          "OCP FP8 E4M3, 16-bit scale per 128 values",                                                                \
          16.0 / 384 * (1 + 0x1p-7),                                                                                  \
          .is_fp8 = 1, .is_rotated = 0, .has_levels = 0,                                                              \
          .factor = 0x1p32 / 448, .factor_noisy = 0x1p32 / 448, .factor_escaped = 0x1p32 / 384,                       \
          .ordinary_dropped_bits = 16, .unit = 0x1p-32, .unit_escaped = 0x1p-32,                                      \
          .table_half = 59, .table_kinds = 5, .table_size = 3, .table_factor = 0x1p32 / 59,                           \
          .table_unit = 0x1p-16)                                                                                      \
    GROUP(ARG, fp8_e5m2, 2, GCK_E5M2, SIMD, CUDA, 8, 1, 0,                                                            \
          "OCP FP8 E5M2, 16-bit scale per 128 values",                                                                \
          4096.0 / 57344 * (1 + 0x1p-7),                                                                              \
          .is_fp8 = 1, .is_rotated = 0, .has_levels = 0,                                                              \
          .factor = 0x1p40 / 57344, .factor_noisy = 0x1p40 / 57344, .factor_escaped = 0x1p40 / 57344,                 \
          .ordinary_dropped_bits = 16, .unit = 0x1p-40, .unit_escaped = 0x1p-40,                                      \
          .table_half = 59, .table_kinds = 5, .table_size = 3, .table_factor = 0x1p32 / 59,                           \
          .table_unit = 0x1p-16)                                                                                      \
    GROUP(ARG, int8, 13, GCK_INT8, SIMD, CUDA, 8, 1, 1,                                                               \
          "sign-randomised Hadamard-128, int8, 16-bit scale per 128 values",                                          \
          128.0 / 254 * (1 + 0x1p-6),                                                                                 \
          .is_fp8 = 0, .is_rotated = 1, .has_levels = 0,                                                              \
          .factor = 0x1p25 / 127, .factor_noisy = 0x1p25 / 127, .factor_escaped = 0x1p32 / 125,                       \
          .ordinary_dropped_bits = 16, .unit = 0x1p-25, .unit_escaped = 0x1p-32,                                      \
          .table_half = 59, .table_kinds = 5, .table_size = 3, .table_factor = 0x1p32 / 59,                           \
          .table_unit = 0x1p-16)                                                                                      \
    GROUP(ARG, int8_plain, 14, GCK_INT8_PLAIN, SIMD, CUDA, 8, 1, 1,                                                   \
          "int8, 16-bit scale per 128 values, no rotation",                                                           \
          1.0 / 250 * (1 + 0x1p-6),                                                                                   \
          .is_fp8 = 0, .is_rotated = 0, .has_levels = 0,                                                              \
          .factor = 0x1p32 / 127, .factor_noisy = 0x1p32 / 127, .factor_escaped = 0x1p32 / 125,                       \
          .ordinary_dropped_bits = 16, .unit = 0x1p-32, .unit_escaped = 0x1p-32,                                      \
          .table_half = 59, .table_kinds = 5, .table_size = 3, .table_factor = 0x1p32 / 59,                           \
          .table_unit = 0x1p-16)                                                                                      \
    GROUP(ARG, int6, 15, GCK_INT6, SIMD, CUDA, 6, 1, 1,                                                               \
          "sign-randomised Hadamard-128, 64 levels, 16-bit scale per 128 values",                                     \
          4.5 / 127 * 128 * (1 + 0x1p-5),                                                                             \
          .is_fp8 = 0, .is_rotated = 1, .has_levels = 1,                                                              \
          .factor = 0x1p25 / 127, .factor_noisy = 0x1p25 / 125.5, .factor_escaped = 0x1p32 / 29,                      \
          .ordinary_dropped_bits = 17, .unit = 0x1p-25, .unit_escaped = 0x1p-32,                                      \
          .table_half = 11, .table_kinds = 5, .table_size = 3, .table_factor = 0x1p24 / 11,                           \
          .table_unit = 0x1p-12)                                                                                      \
    GROUP(ARG, int4, 16, GCK_INT4, SIMD, CUDA, 4, 2, 1,                                                               \
          "sign-randomised Hadamard-128 of all but the largest value, 16 levels, 32 bits per 128 values",             \
          13.0 / 127 * 128 * (1 + 0x1p-3),                                                                            \
          .is_fp8 = 0, .is_rotated = 1, .has_levels = 1,                                                              \
          .factor = 0x1p25 / 127, .factor_noisy = 0x1p25 / 115.5, .factor_escaped = 0x1p28 / 5,                       \
          .ordinary_dropped_bits = 19, .unit = 0x1p-25, .unit_escaped = 0x1p-28,                                      \
          .table_half = 1, .table_kinds = 3, .table_size = 2, .table_factor = 0x1p24,                                 \
          .table_unit = 0x1p-12)                                                                                      \
    CODEC(ARG, bf16, 7)                                                                                               \
    CODEC(ARG, fp16, 8)                                                                                               \
    CODEC(ARG, lossless, 9)                                                                                           \
    CODEC(ARG, mask, 10)                                                                                              \
    CODEC(ARG, sparse, 11)                                                                                            \
    CODEC(ARG, sparse_int8, 12)

#define GCK_SKIP_ROW(...)                /* for users of one kind of row */
#define GCK_GROUP_CODECS(GROUP, ARG) GCK_CODECS(GCK_SKIP_ROW, GROUP, ARG)

#endif
