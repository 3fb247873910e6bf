/* planes.c: all first bytes of the values, then all second bytes, and so on: bit-exact. */
#include "codec/cuda/cuda_device.h"
#include "codec/format/float_bits.h"
#include "codec/host/pieces.h"
#include "codec/host/strided.h"

typedef struct {
    const gck_tensor *tensor;
    uint8_t          *payload;
} work;

static int split(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const work *w = ctx;
    const int64_t item = (int64_t)gck_itemsize(w->tensor->dtype);

    (void)streaming;
    for (int64_t i = 0; i < count * item; i++) {
        w->payload[i % item * w->tensor->numel + first + i / item] = ((const uint8_t *)values)[i];
    }
    return GCK_OK;
}

static int join(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const work *w = ctx;
    const int64_t item = (int64_t)gck_itemsize(w->tensor->dtype);

    (void)streaming;
    for (int64_t i = 0; i < count * item; i++) {
        ((uint8_t *)values)[i] = w->payload[i % item * w->tensor->numel + first + i / item];
    }
    return GCK_OK;
}

static int planes_encode(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first, int64_t last)
{
    work w = {x, to.codes};

    (void)how;
    return gck_encode_pieces(x, GCK_BLOCK, first, last, 1, split, &w);
}

static void planes_decode(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last)
{
    work w = {out, from.codes};

    gck_decode_pieces(out, GCK_BLOCK, first, last, 1, join, &w);
}

const gck_codec gck_codec_planes = {
    .name = "planes",
    .summary = "a toy: the bytes of all values, sorted by significance",
    .dtypes = GCK_FLOATS,
    .size = {[GCK_F32] = {4, 0, 0}, [GCK_F16] = {2, 0, 0}, [GCK_BF16] = {2, 0, 0}},
    .unit = GCK_BLOCK,
    .encode_host = planes_encode,
    .decode_host = planes_decode,
};
