/* int8.c: integers with one 16-bit scale per 128 values, rotated or not.  group.h does the
 * arithmetic.
 *
 * The stated errors: for int8_plain, half a step of a group with escapes, amax / 250, plus the
 * rounding of the scale; amax / 118 in the rare form B, which trades a bit for exact sentinels.  For
 * the rotated codecs, the worst case over all inputs, when every error of a group adds up at one
 * value.  Their root mean square is what matters, and it is at most |x| / 254 of the group's
 * Euclidean norm for int8 (see docs/codecs.md).  The widest half cell is half a step for int8 (a
 * whole one for the coarser codes of an outlier group), 4.5 for int6 and 13 for int4, of 127. */
#include "codec/host/group_host.h"

#define CODEC(codec, format, words, error)                                                          \
    GCK_DECLARE_CUDA(codec)                                                                         \
    static int codec##_encode(const gck_tensor *x, void *payload, const gck_how *how, int64_t first, \
                              int64_t last)                                                         \
    {                                                                                               \
        return gck_group_encode(format, x, payload, how, first, last);                              \
    }                                                                                               \
    static void codec##_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last) \
    {                                                                                               \
        gck_group_decode(format, payload, out, first, last);                                        \
    }                                                                                               \
    const gck_codec gck_codec_##codec = {                                                           \
        .name = #codec,                                                                             \
        .summary = words,                                                                           \
        .dtypes = GCK_FLOATS,                                                                       \
        .max_error = error,                                                                         \
        .size = GCK_GROUP_SIZE(format),                                                             \
        .unit = GCK_GROUP,                                                                          \
        .stochastic = 1,                                                                            \
        .encode_host = codec##_encode,                                                              \
        .decode_host = codec##_decode,                                                              \
        .encode = GCK_CUDA(gck_##codec##_encode_cuda),                                              \
        .decode = GCK_CUDA(gck_##codec##_decode_cuda),                                              \
    };

CODEC(int8, GCK_INT8, "sign-randomised Hadamard-128, int8, 16-bit scale per 128 values", 128.0 / 254 * (1 + 0x1p-6))
CODEC(int8_plain, GCK_INT8_PLAIN, "int8, 16-bit scale per 128 values, no rotation", 1.0 / 250 * (1 + 0x1p-6))
CODEC(int6, GCK_INT6, "sign-randomised Hadamard-128, 64 levels, 16-bit scale per 128 values", 4.5 / 127 * 128 * (1 + 0x1p-5))
CODEC(int4, GCK_INT4, "sign-randomised Hadamard-128 of all but the largest value, 16 levels, 32 bits per 128 values",
      13.0 / 127 * 128 * (1 + 0x1p-3))
