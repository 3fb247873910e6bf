/* group_host.c: runs the kernels of cpu_features.h over a tensor: whole contiguous groups directly, the padded
 * last group and strided tensors through a small buffer. */
#include "codec/host/group_host.h"

#include "codec/host/cpu_features.h"
#include "codec/host/strided.h"

enum {
    BLOCK = 16,                       /* groups gathered at a time: 8 KiB of float32 */
    STREAM_ENCODE = 2 << 20,          /* values; the payload is not read again before backward */
    STREAM_DECODE = 32 << 20,  /* output bytes; smaller outputs are still in cache when the recompute reads them */
};

static int64_t ngroups_of(int64_t numel) { return numel / GCK_GROUP + (numel % GCK_GROUP != 0); }

/* The address of the codes of group g in a payload, and of the words beside them. */
static uint8_t *codes_at(gck_format format, const void *payload, int64_t g)
{
    return (uint8_t *)payload + g * GCK_CODE_BYTES(format);
}

static uint16_t *side_at(gck_format format, const void *payload, int64_t numel, int64_t g)
{
    return (uint16_t *)codes_at(format, payload, ngroups_of(numel)) + g * GCK_SIDE_WORDS(format);
}

/* The first group that cannot be read or written in place. */
static int64_t direct_until(const gck_tensor *x, int64_t first, int64_t last)
{
    const int64_t whole = x->strides == NULL ? x->numel / GCK_GROUP : first;

    return whole < first ? first : whole < last ? whole : last;
}

/* Encode n whole groups, from g on, at `values`. */
static void encode_run(gck_format format, const gck_tensor *x, const void *values, int64_t g, int64_t n, void *payload,
                       const gck_dither *dither, int streaming)
{
    const gck_isa *isa = gck_isa_current();
    uint8_t *codes = codes_at(format, payload, g);
    uint16_t *side = side_at(format, payload, x->numel, g);

    if (dither != NULL) {
        gck_encode_noisy_groups *encode = isa->encode_noisy[format][x->dtype];
        (encode ? encode : gck_isa_scalar.encode_noisy[format][x->dtype])(values, n, codes, side, dither, g);
    } else {
        gck_encode_groups *encode = isa->encode[format][x->dtype];
        (encode ? encode : gck_isa_scalar.encode[format][x->dtype])(values, n, codes, side, g, streaming);
    }
}

static void decode_run(gck_format format, const void *payload, const gck_tensor *out, int64_t g, int64_t n, void *values,
                       int streaming)
{
    gck_decode_groups *decode = gck_isa_current()->decode[format][out->dtype];

    (decode ? decode : gck_isa_scalar.decode[format][out->dtype])(codes_at(format, payload, g),
                                                                  side_at(format, payload, out->numel, g), n, values, g,
                                                                  streaming);
}

int gck_group_encode(gck_format format, const gck_tensor *x, void *payload, const gck_how *how, int64_t first,
                     int64_t last)
{
    const gck_dither *dither = how != NULL ? how->dither : NULL;
    const size_t item = gck_itemsize(x->dtype), stride = GCK_GROUP * item;
    int64_t g = direct_until(x, first, last);
    float block[BLOCK * GCK_GROUP];   /* large enough for every dtype, and aligned */

    if (g > first) {
        encode_run(format, x, (const char *)x->data + (size_t)first * stride, first, g - first, payload, dither,
                   x->numel >= STREAM_ENCODE);
    }
    while (g < last) {
        const int64_t n = last - g < BLOCK ? last - g : BLOCK;
        const int64_t left = x->numel - g * GCK_GROUP;
        const int64_t count = left < n * GCK_GROUP ? left : n * GCK_GROUP;
        gck_gather(x, g * GCK_GROUP, count, block);
        memset((char *)block + (size_t)count * item, 0, (size_t)(n * GCK_GROUP - count) * item);
        encode_run(format, x, block, g, n, payload, dither, 0);
        g += n;
    }
    return GCK_OK;
}

void gck_group_decode(gck_format format, const void *payload, const gck_tensor *out, int64_t first, int64_t last)
{
    const size_t item = gck_itemsize(out->dtype), stride = GCK_GROUP * item;
    int64_t g = direct_until(out, first, last);
    float block[BLOCK * GCK_GROUP];

    if (g > first) {
        decode_run(format, payload, out, first, g - first, (char *)out->data + (size_t)first * stride,
                   out->numel * (int64_t)item >= STREAM_DECODE);
    }
    while (g < last) {
        const int64_t n = last - g < BLOCK ? last - g : BLOCK;
        const int64_t left = out->numel - g * GCK_GROUP;
        decode_run(format, payload, out, g, n, block, 0);
        gck_scatter(out, g * GCK_GROUP, left < n * GCK_GROUP ? left : n * GCK_GROUP, block);
        g += n;
    }
}
