/* elementwise.c: chooses the kernels of elementwise.h, and passes any tensor to them. */
#include "codec/host/elementwise.h"

#include "codec/host/cpu_features.h"
#include "codec/host/strided.h"

enum {
    STREAM_ENCODE = 2 << 20,          /* values; the payload is not read again before backward */
    STREAM_DECODE = 32 << 20,  /* output bytes; smaller outputs are still in cache when the recompute reads them */
};

#define TABLE(isa)                                                                                          \
    {                                                                                                       \
        #isa, gck_##isa##_to_bf16, gck_##isa##_to_f16, gck_##isa##_from_bf16, gck_##isa##_from_f16,         \
            gck_##isa##_mask_pack, gck_##isa##_mask_unpack,                                                 \
            {gck_##isa##_lossless_encode_f32, gck_##isa##_lossless_encode_f16, gck_##isa##_lossless_encode_bf16}, \
            {gck_##isa##_lossless_decode_f32, gck_##isa##_lossless_decode_f16, gck_##isa##_lossless_decode_bf16}, \
    }

/* The last one serves every CPU. */
static const gck_direct tables[] = {
#if defined(__x86_64__)
    TABLE(avx512),
    TABLE(avx2),
#endif
    TABLE(scalar),
};

const gck_direct *gck_direct_current(void)
{
    const char *name = gck_isa_current()->name;
    size_t i = 0;

    while (i + 1 < sizeof tables / sizeof tables[0] && strcmp(tables[i].name, name) != 0) {
        i++;
    }
    return &tables[i];
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The blocks from `first` on that can be used in place. */
static int64_t whole_blocks(const gck_tensor *t, int64_t first, int64_t last)
{
    const int64_t whole = t->strides == NULL ? smaller(t->numel / GCK_BLOCK, last) : first;

    return whole > first ? whole - first : 0;
}

int gck_encode_pieces(const gck_tensor *x, int64_t first, int64_t last, gck_piece *piece, void *ctx)
{
    const size_t item = gck_itemsize(x->dtype);
    const int64_t direct = whole_blocks(x, first, last);
    int status = GCK_OK;
    _Alignas(64) char buffer[GCK_BLOCK * sizeof(float)];

    if (direct > 0) {
        status = piece((char *)x->data + (size_t)(first * GCK_BLOCK) * item, first * GCK_BLOCK, direct * GCK_BLOCK,
                       x->numel >= STREAM_ENCODE, ctx);
    }
    for (int64_t b = first + direct; b < last; b++) {
        const int64_t count = smaller(x->numel - b * GCK_BLOCK, GCK_BLOCK);
        const int64_t padding = -count & (GCK_GROUP - 1);
        gck_gather(x, b * GCK_BLOCK, count, buffer);
        memset(buffer + (size_t)count * item, 0, (size_t)padding * item);
        const int answer = piece(buffer, b * GCK_BLOCK, count, 0, ctx);
        status = answer != GCK_OK ? answer : status;
    }
    return status;
}

void gck_decode_pieces(const gck_tensor *out, int64_t first, int64_t last, gck_piece *piece, void *ctx)
{
    const size_t item = gck_itemsize(out->dtype);
    const int64_t direct = whole_blocks(out, first, last);
    _Alignas(64) char buffer[GCK_BLOCK * sizeof(float)];

    if (direct > 0) {
        piece((char *)out->data + (size_t)(first * GCK_BLOCK) * item, first * GCK_BLOCK, direct * GCK_BLOCK,
              out->numel * (int64_t)item >= STREAM_DECODE, ctx);
    }
    for (int64_t b = first + direct; b < last; b++) {
        const int64_t count = smaller(out->numel - b * GCK_BLOCK, GCK_BLOCK);
        piece(buffer, b * GCK_BLOCK, count, 0, ctx);
        gck_scatter(out, b * GCK_BLOCK, count, buffer);
    }
}
