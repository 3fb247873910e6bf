/* mask.c: bools, one bit each: bit i % 8 of byte i / 8 is value i.  The last group of 128 is padded
 * with zeros.  Any byte but 0 is true; decoding writes 0 and 1. */
#include "codec/cuda/cuda_device.h"
#include "codec/host/cpu_features.h"
#include "codec/host/pieces.h"

GCK_DECLARE_CUDA(mask)

enum { GROUP_BYTES = GCK_GROUP / 8 };

static int pack_piece(void *values, int64_t first, int64_t count, int streaming, void *payload)
{
    GCK_KERNEL(mask_pack)(values, gck_groups_of(count), (uint8_t *)payload + first / 8, streaming);
    return GCK_OK;
}

static int unpack_piece(void *values, int64_t first, int64_t count, int streaming, void *payload)
{
    GCK_KERNEL(mask_unpack)((const uint8_t *)payload + first / 8, gck_groups_of(count), values, streaming);
    return GCK_OK;
}

static int mask_encode(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first, int64_t last)
{
    (void)how;
    return gck_encode_pieces(x, GCK_BLOCK, first, last, 1, pack_piece, to.codes);
}

static void mask_decode(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last)
{
    gck_decode_pieces(out, GCK_BLOCK, first, last, 1, unpack_piece, from.codes);
}

const gck_codec gck_codec_mask = {
    .name = "mask",
    .summary = "bool, one bit per value",
    .dtypes = GCK_BIT(GCK_BOOL),
    .max_error = 0,
    .size = {[GCK_BOOL] = {0, GROUP_BYTES, 0}},
    .unit = GCK_BLOCK,
    .encode_host = mask_encode,
    .decode_host = mask_decode,
    .encode = GCK_CUDA(gck_mask_encode_cuda),
    .decode = GCK_CUDA(gck_mask_decode_cuda),
};
