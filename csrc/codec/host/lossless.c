/* lossless.c: the codec lossless: bit-exact, with 4 bits for each exponent. format/lossless.h is
 * the format; where that of format/sparse.h is smaller, the host takes it. */
#include "codec/cuda/cuda_device.h"
#include "codec/host/cpu_features.h"
#include "codec/host/pieces.h"
#include "codec/host/sparse_payload.h"

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

static int64_t own_nbytes(int64_t numel, gck_dtype dtype)
{
    return (gck_group_bytes(dtype) + 1) * gck_groups_of(numel) + GCK_ARENA * gck_blocks_of(numel);
}

static int is_sparse(const gck_tensor *x) { return x->room != 0 && x->room < own_nbytes(x->numel, x->dtype); }

static int lossless_encode(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first, int64_t last)
{
    work w = {x, to.codes};

    (void)how;
    return is_sparse(x) ? gck_sparse_encode(x, to.codes, first, last)
                        : gck_encode_pieces(x, GCK_BLOCK, first, last, 1, encode_piece, &w);
}

static void lossless_decode(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last)
{
    work w = {out, from.codes};

    if (is_sparse(out)) {
        gck_sparse_decode(from.codes, out, first, last);
    } else {
        gck_decode_pieces(out, GCK_BLOCK, first, last, 1, decode_piece, &w);
    }
}

static int64_t lossless_nbytes(int64_t numel, gck_dtype dtype, int64_t values)
{
    const int64_t own = own_nbytes(numel, dtype);
    const int64_t sparse = gck_sparse_head(numel) + values * (int64_t)gck_itemsize(dtype);

    return sparse < own ? sparse : own;
}

/* Counting takes as long as half of an encode, and most activations have no zeros: it is done where a
 * twentieth of the values in some blocks, as far apart as can be, are zeros. */
static int has_zeros(const gck_tensor *x)
{
    enum { SAMPLE = 64, FEW = 20 };
    const int64_t blocks = gck_blocks_of(x->numel), step = blocks > SAMPLE ? blocks / SAMPLE : 1;
    int64_t values = 0, all = 0;

    for (int64_t b = 0; b < blocks; b += step) {
        const int64_t left = x->numel - b * GCK_BLOCK;
        values += gck_count_nonzeros(x, NULL, 0, b, b + 1);
        all += left < GCK_BLOCK ? left : GCK_BLOCK;
    }
    return values < all - all / FEW;
}

static const gck_counted counted = {
    .count = gck_sparse_count,
    .place = gck_sparse_place,
    .nbytes = lossless_nbytes,
    .worth = has_zeros,
    .host_only = 1,
};

const gck_codec gck_codec_lossless = {
    .name = "lossless",
    .summary = "bit-exact, 4 bits per exponent; refuses values of too many magnitudes",
    .dtypes = GCK_FLOATS,
    .max_error = 0,
    .size = {[GCK_F32] = {0, 448 + 1, GCK_ARENA}, [GCK_F16] = {0, 240 + 1, GCK_ARENA},
             [GCK_BF16] = {0, 192 + 1, GCK_ARENA}},
    .counted = &counted,
    .unit = GCK_BLOCK,
    .may_overflow = 1,
    .encode_host = lossless_encode,
    .decode_host = lossless_decode,
    .encode = GCK_CUDA(gck_lossless_encode_cuda),
    .decode = GCK_CUDA(gck_lossless_decode_cuda),
};
