/* fp8.c: OCP FP8 with one 16-bit scale per 128 values. group.h does the arithmetic.
 *
 * The stated error is half a step of the top binade, over amax.  A group with escapes maps amax to a
 * lower code (see group.h), which is the worse case for E4M3. */
#include "codec/host/group_host.h"

GCK_DECLARE_CUDA(fp8_e4m3)
GCK_DECLARE_CUDA(fp8_e5m2)

static int fp8_e4m3_encode(const gck_tensor *x, void *payload, const gck_how *how, int64_t first, int64_t last)
{
    return gck_group_encode(GCK_E4M3, x, payload, how, first, last);
}

static void fp8_e4m3_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last)
{
    gck_group_decode(GCK_E4M3, payload, out, first, last);
}

const gck_codec gck_codec_fp8_e4m3 = {
    .name = "fp8_e4m3",
    .summary = "OCP FP8 E4M3, 16-bit scale per 128 values",
    .dtypes = GCK_FLOATS,
    .max_error = 16.0 / 384 * (1 + 0x1p-7),
    .size = GCK_GROUP_SIZE(GCK_E4M3),
    .unit = GCK_GROUP,
    .stochastic = 1,
    .encode_host = fp8_e4m3_encode,
    .decode_host = fp8_e4m3_decode,
    .encode = GCK_CUDA(gck_fp8_e4m3_encode_cuda),
    .decode = GCK_CUDA(gck_fp8_e4m3_decode_cuda),
};

static int fp8_e5m2_encode(const gck_tensor *x, void *payload, const gck_how *how, int64_t first, int64_t last)
{
    return gck_group_encode(GCK_E5M2, x, payload, how, first, last);
}

static void fp8_e5m2_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last)
{
    gck_group_decode(GCK_E5M2, payload, out, first, last);
}

const gck_codec gck_codec_fp8_e5m2 = {
    .name = "fp8_e5m2",
    .summary = "OCP FP8 E5M2, 16-bit scale per 128 values",
    .dtypes = GCK_FLOATS,
    .max_error = 4096.0 / 57344 * (1 + 0x1p-7),
    .size = GCK_GROUP_SIZE(GCK_E5M2),
    .unit = GCK_GROUP,
    .stochastic = 1,
    .encode_host = fp8_e5m2_encode,
    .decode_host = fp8_e5m2_decode,
    .encode = GCK_CUDA(gck_fp8_e5m2_encode_cuda),
    .decode = GCK_CUDA(gck_fp8_e5m2_decode_cuda),
};
