/* raw.c: the values unchanged, in contiguous order.  It is the control in every benchmark. */
#include "codec/cuda/cuda_device.h"
#include "codec/format/float_bits.h"
#include "codec/host/strided.h"

GCK_DECLARE_CUDA(raw)

/* Units are runs of 128 values, as in every codec; the last may be shorter. */
static int64_t count_of(const gck_tensor *x, int64_t first, int64_t last)
{
    const int64_t left = x->numel - first * GCK_GROUP, most = (last - first) * GCK_GROUP;

    return left < most ? left : most;
}

static int raw_encode(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first, int64_t last)
{
    char *out = (char *)to.codes + (size_t)first * GCK_GROUP * gck_itemsize(x->dtype);

    (void)how;
    gck_gather(x, first * GCK_GROUP, count_of(x, first, last), out);
    return GCK_OK;
}

static void raw_decode(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last)
{
    const char *in = (const char *)from.codes + (size_t)first * GCK_GROUP * gck_itemsize(out->dtype);

    gck_scatter(out, first * GCK_GROUP, count_of(out, first, last), in);
}

const gck_codec gck_codec_raw = {
    .name = "raw",
    .summary = "bit-exact copy, the control in benchmarks",
    .dtypes = GCK_FLOATS,
    .max_error = 0,
    .size = {[GCK_F32] = {4, 0, 0}, [GCK_F16] = {2, 0, 0}, [GCK_BF16] = {2, 0, 0}},
    .unit = GCK_GROUP,
    .encode_host = raw_encode,
    .decode_host = raw_decode,
    .encode = GCK_CUDA(gck_raw_encode_cuda),
    .decode = GCK_CUDA(gck_raw_decode_cuda),
};
