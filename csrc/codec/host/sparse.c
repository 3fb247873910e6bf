/* sparse.c: the codec sparse: bit-exact, one bit for each value and the words of those that are not
 * zero.  format/sparse.h is the format. */
#include "codec/cuda/cuda_device.h"
#include "codec/host/sparse_payload.h"

GCK_DECLARE_CUDA(sparse)

extern const gck_codec gck_codec_raw;              /* a payload that is the tensor */

static int is_whole(const gck_tensor *x)
{
    return x->room == 0 || x->room >= x->numel * (int64_t)gck_itemsize(x->dtype);
}

static int sparse_encode(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first, int64_t last)
{
    return is_whole(x) ? gck_codec_raw.encode_host(x, to, how, first * GCK_BLOCK_GROUPS, last * GCK_BLOCK_GROUPS)
                       : gck_sparse_encode(x, to.codes, first, last);
}

static void sparse_decode(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last)
{
    if (is_whole(out)) {
        gck_codec_raw.decode_host(from, out, first * GCK_BLOCK_GROUPS, last * GCK_BLOCK_GROUPS);
    } else {
        gck_sparse_decode(from.codes, out, first, last);
    }
}

static const gck_counted counted = {.count = gck_sparse_count, .place = gck_sparse_place, .nbytes = gck_sparse_nbytes};

const gck_codec gck_codec_sparse = {
    .name = "sparse",
    .summary = "bit-exact, one bit per value and the values that are not zero",
    .dtypes = GCK_FLOATS,
    .max_error = 0,
    .size = {[GCK_F32] = {4, 0, 0}, [GCK_F16] = {2, 0, 0}, [GCK_BF16] = {2, 0, 0}},
    .counted = &counted,
    .unit = GCK_BLOCK,
    .may_overflow = 1,
    .encode_host = sparse_encode,
    .decode_host = sparse_decode,
    .encode = GCK_CUDA(gck_sparse_encode_cuda),
    .decode = GCK_CUDA(gck_sparse_decode_cuda),
};
