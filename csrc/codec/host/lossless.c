/* lossless.c: the codec lossless: bit-exact, with 4 bits for each exponent. format/lossless.h is
 * the format. */
#include "codec/cuda/cuda_entry.h"
#include "codec/host/cpu_features.h"
#include "codec/host/pieces.h"

GCK_DECLARE_CUDA(lossless)

typedef struct {
    const gck_tensor *tensor;
    const void       *payload;
} work;

static int encode_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const work *w = ctx;
    const gck_dtype dtype = w->tensor->dtype;

    return GCK_KERNEL(lossless_encode[dtype])(
        values, gck_groups_of(count), gck_parts_of(w->payload, w->tensor->numel, dtype, first / GCK_BLOCK), streaming);
}

static int decode_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const work *w = ctx;
    const gck_dtype dtype = w->tensor->dtype;

    GCK_KERNEL(lossless_decode[dtype])(
        gck_parts_of(w->payload, w->tensor->numel, dtype, first / GCK_BLOCK), gck_groups_of(count), values, streaming);
    return GCK_OK;
}

static int lossless_encode(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first, int64_t last)
{
    work w = {x, to.codes};

    (void)how;
    return gck_encode_pieces(x, GCK_BLOCK, first, last, 1, encode_piece, &w);
}

static void lossless_decode(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last)
{
    work w = {out, from.codes};

    gck_decode_pieces(out, GCK_BLOCK, first, last, 1, decode_piece, &w);
}

const gck_codec gck_codec_lossless = {
    .name = "lossless",
    .summary = "bit-exact, 4 bits per exponent; refuses values of too many magnitudes",
    .dtypes = GCK_FLOATS,
    .max_error = 0,
    .size = {[GCK_F32] = {0, 448 + 1, GCK_ARENA}, [GCK_F16] = {0, 240 + 1, GCK_ARENA},
             [GCK_BF16] = {0, 192 + 1, GCK_ARENA}},
    .unit = GCK_BLOCK,
    .may_overflow = 1,
    .encode_host = lossless_encode,
    .decode_host = lossless_decode,
    .encode = GCK_CUDA(gck_lossless_encode_cuda),
    .decode = GCK_CUDA(gck_lossless_decode_cuda),
};
