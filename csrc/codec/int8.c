/* int8.c: 8-bit integers with one 16-bit scale per 128 values: group.h does the
 * arithmetic.
 *
 * The stated errors.  int8_plain: half a step of a group with escapes, amax / 250, plus
 * the rounding of the scale; amax / 118 in the rare form B, which trades a bit for exact
 * sentinels.  int8: the worst case over all inputs, every error of a group adding up at
 * one value; the root mean square is what matters, and it is at most |x| / 254 of the
 * group's Euclidean norm (see docs/codecs.md). */
#include "host.h"

GCK_DECLARE_CUDA(int8)
GCK_DECLARE_CUDA(int8_plain)

static int int8_encode(const gck_tensor *x, void *payload, const gck_how *how, int64_t first, int64_t last)
{
    return gck_group_encode(GCK_INT8, x, payload, how, first, last);
}

static void int8_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last)
{
    gck_group_decode(GCK_INT8, payload, out, first, last);
}

const gck_codec gck_codec_int8 = {
    .name = "int8",
    .summary = "sign-randomised Hadamard-128, int8, 16-bit scale per 128 values",
    .dtypes = GCK_FLOATS,
    .max_error = 128.0 / 254 * (1 + 0x1p-6),
    .size = GCK_GROUP_SIZE(GCK_GROUP),
    .unit = GCK_GROUP,
    .stochastic = 1,
    .encode_host = int8_encode,
    .decode_host = int8_decode,
    .encode = GCK_CUDA(gck_int8_encode_cuda),
    .decode = GCK_CUDA(gck_int8_decode_cuda),
};

static int int8_plain_encode(const gck_tensor *x, void *payload, const gck_how *how, int64_t first, int64_t last)
{
    return gck_group_encode(GCK_INT8_PLAIN, x, payload, how, first, last);
}

static void int8_plain_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last)
{
    gck_group_decode(GCK_INT8_PLAIN, payload, out, first, last);
}

const gck_codec gck_codec_int8_plain = {
    .name = "int8_plain",
    .summary = "int8, 16-bit scale per 128 values, no rotation",
    .dtypes = GCK_FLOATS,
    .max_error = 1.0 / 250 * (1 + 0x1p-6),
    .size = GCK_GROUP_SIZE(GCK_GROUP),
    .unit = GCK_GROUP,
    .stochastic = 1,
    .encode_host = int8_plain_encode,
    .decode_host = int8_plain_decode,
    .encode = GCK_CUDA(gck_int8_plain_encode_cuda),
    .decode = GCK_CUDA(gck_int8_plain_decode_cuda),
};
