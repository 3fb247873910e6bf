/* cast.c: the codecs bf16 and fp16: float32 rounded to a 16-bit dtype. format/cast.h is the
 * format. */
#include "codec/cuda/cuda_device.h"
#include "codec/host/cpu_features.h"
#include "codec/host/pieces.h"

GCK_DECLARE_CUDA(bf16)
GCK_DECLARE_CUDA(fp16)

/* One set of functions for each: kernels are chosen at run time. */
#define CODEC(codec, kernel)                                                                                  \
    static int codec##_piece(void *values, int64_t first, int64_t count, int streaming, void *payload)        \
    {                                                                                                         \
        return GCK_KERNEL(to_##kernel)(values, count, (uint16_t *)payload + first, streaming);                \
    }                                                                                                         \
    static int codec##_back(void *values, int64_t first, int64_t count, int streaming, void *payload)         \
    {                                                                                                         \
        GCK_KERNEL(from_##kernel)((const uint16_t *)payload + first, count, values, streaming);               \
        return GCK_OK;                                                                                        \
    }                                                                                                         \
    static int codec##_encode(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first,           \
                              int64_t last)                                                                   \
    {                                                                                                         \
        (void)how;                                                                                            \
        return gck_encode_pieces(x, GCK_BLOCK, first, last, 1, codec##_piece, to.codes);                      \
    }                                                                                                         \
    static void codec##_decode(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last)            \
    {                                                                                                         \
        gck_decode_pieces(out, GCK_BLOCK, first, last, 1, codec##_back, from.codes);                          \
    }
CODEC(bf16, bf16)
CODEC(fp16, f16)

/* max_error: half a unit in the last place of a value just above a power of two. float16 has
 * subnormals where float32 has none: there the error is up to 2^-25 whatever amax is. */
const gck_codec gck_codec_bf16 = {
    .name = "bf16",
    .summary = "float32 rounded to bfloat16",
    .dtypes = GCK_BIT(GCK_F32),
    .max_error = 0x1p-8,
    .size = {[GCK_F32] = {2, 0, 0}},
    .unit = GCK_BLOCK,
    .may_overflow = 1,
    .encode_host = bf16_encode,
    .decode_host = bf16_decode,
    .encode = GCK_CUDA(gck_bf16_encode_cuda),
    .decode = GCK_CUDA(gck_bf16_decode_cuda),
};

const gck_codec gck_codec_fp16 = {
    .name = "fp16",
    .summary = "float32 rounded to float16; refuses magnitudes of 65520 and more",
    .dtypes = GCK_BIT(GCK_F32),
    .max_error = 0x1p-11,
    .size = {[GCK_F32] = {2, 0, 0}},
    .unit = GCK_BLOCK,
    .may_overflow = 1,
    .encode_host = fp16_encode,
    .decode_host = fp16_decode,
    .encode = GCK_CUDA(gck_fp16_encode_cuda),
    .decode = GCK_CUDA(gck_fp16_decode_cuda),
};
