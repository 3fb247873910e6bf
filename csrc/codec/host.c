/* host.c: drives the kernels of cpu.h over a tensor: whole contiguous groups go
 * straight to them, the padded last group and strided tensors through a small buffer. */
#include "host.h"

#include "cpu.h"
#include "strided.h"

enum {
    BLOCK = 16,                       /* groups gathered at a time: 8 KiB of float32 */
    STREAM_ENCODE = 2 << 20,          /* payload bytes; not read again before backward */
    STREAM_DECODE = 32 << 20,         /* output bytes; below, the recompute reads it hot */
};

static int64_t ngroups_of(int64_t numel) { return numel / GCK_GROUP + (numel % GCK_GROUP != 0); }

/* The first group that cannot be read or written in place. */
static int64_t direct_until(const gck_tensor *x, int64_t first, int64_t last)
{
    const int64_t whole = x->strides == NULL ? x->numel / GCK_GROUP : first;

    return whole < first ? first : whole < last ? whole : last;
}

int gck_group_encode(gck_format format, const gck_tensor *x, void *payload, const gck_how *how, int64_t first,
                     int64_t last)
{
    gck_encode_groups *encode = gck_isa_current()->encode[format][x->dtype];
    const size_t stride = GCK_GROUP * gck_itemsize(x->dtype);
    uint8_t *codes = payload;
    uint16_t *scales = (uint16_t *)(codes + ngroups_of(x->numel) * GCK_GROUP);
    const int streaming = x->numel >= STREAM_ENCODE;
    int64_t g = direct_until(x, first, last);
    float block[BLOCK * GCK_GROUP];   /* large enough for every dtype, and aligned */

    if (g > first) {
        encode((const char *)x->data + (size_t)first * stride, g - first, codes + first * GCK_GROUP,
               scales + first, streaming);
    }
    while (g < last) {
        const int64_t n = last - g < BLOCK ? last - g : BLOCK;
        const int64_t left = x->numel - g * GCK_GROUP;
        const int64_t count = left < n * GCK_GROUP ? left : n * GCK_GROUP;
        gck_gather(x, g * GCK_GROUP, count, block);
        memset((char *)block + (size_t)count * gck_itemsize(x->dtype), 0,
               (size_t)(n * GCK_GROUP - count) * gck_itemsize(x->dtype));
        encode(block, n, codes + g * GCK_GROUP, scales + g, 0);
        g += n;
    }
    (void)how;
    return GCK_OK;
}

void gck_group_decode(gck_format format, const void *payload, const gck_tensor *out, int64_t first, int64_t last)
{
    gck_decode_groups *decode = gck_isa_current()->decode[format][out->dtype];
    const size_t stride = GCK_GROUP * gck_itemsize(out->dtype);
    const uint8_t *codes = payload;
    const uint16_t *scales = (const uint16_t *)(codes + ngroups_of(out->numel) * GCK_GROUP);
    const int streaming = out->numel * (int64_t)gck_itemsize(out->dtype) >= STREAM_DECODE;
    int64_t g = direct_until(out, first, last);
    float block[BLOCK * GCK_GROUP];

    if (g > first) {
        decode(codes + first * GCK_GROUP, scales + first, g - first,
               (char *)out->data + (size_t)first * stride, streaming);
    }
    while (g < last) {
        const int64_t n = last - g < BLOCK ? last - g : BLOCK;
        const int64_t left = out->numel - g * GCK_GROUP;
        const int64_t count = left < n * GCK_GROUP ? left : n * GCK_GROUP;
        decode(codes + g * GCK_GROUP, scales + g, n, block, 0);
        gck_scatter(out, g * GCK_GROUP, count, block);
        g += n;
    }
}
