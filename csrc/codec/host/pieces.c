/* pieces.c: passes any tensor in host memory to the kernels. */
#include "codec/host/pieces.h"

#include "codec/host/strided.h"

enum {
    STREAM_ENCODE = 2 << 20,   /* values; the payload is not read again before backward */
    STREAM_DECODE = 32 << 20,  /* output bytes; smaller outputs are still in cache when the recompute reads them */
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The values from unit `first` on that can be used in place. */
static int64_t values_in_place(const gck_tensor *t, int64_t unit, int64_t first, int64_t last)
{
    const int64_t whole = t->strides == NULL ? smaller(t->numel / unit, last) : first;

    return whole > first ? (whole - first) * unit : 0;
}

static int each_piece(const gck_tensor *t, int64_t unit, int64_t first, int64_t last, int in_place, int encode,
                      gck_piece *piece, void *ctx)
{
    const size_t item = gck_itemsize(t->dtype);
    const int64_t end = smaller(last * unit, t->numel), direct = in_place ? values_in_place(t, unit, first, last) : 0;
    const int streaming = encode ? t->numel >= STREAM_ENCODE : t->numel * (int64_t)item >= STREAM_DECODE;
    int status = GCK_OK;
    _Alignas(64) char buffer[GCK_BLOCK * sizeof(float)];

    if (direct > 0) {
        status = piece((char *)t->data + (size_t)(first * unit) * item, first * unit, direct, streaming, ctx);
    }
    for (int64_t i = first * unit + direct; i < end; i += GCK_BLOCK) {
        const int64_t count = smaller(end - i, GCK_BLOCK), padding = -count & (GCK_GROUP - 1);
        if (encode) {
            gck_gather(t, i, count, buffer);
            memset(buffer + (size_t)count * item, 0, (size_t)padding * item);
        }
        const int answer = piece(buffer, i, count, 0, ctx);
        status = answer != GCK_OK ? answer : status;
        if (!encode) {
            gck_scatter(t, i, count, buffer);
        }
    }
    return status;
}

int gck_encode_pieces(const gck_tensor *x, int64_t unit, int64_t first, int64_t last, int in_place, gck_piece *piece,
                      void *ctx)
{
    return each_piece(x, unit, first, last, in_place, 1, piece, ctx);
}

void gck_decode_pieces(const gck_tensor *out, int64_t unit, int64_t first, int64_t last, int in_place,
                       gck_piece *piece, void *ctx)
{
    each_piece(out, unit, first, last, in_place, 0, piece, ctx);
}

typedef struct {
    size_t     item;
    gck_block *block;
    void      *ctx;
} by_blocks;

static int each_block(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const by_blocks *by = ctx;
    int status = GCK_OK;

    (void)streaming;
    for (int64_t i = 0; i < count && status == GCK_OK; i += GCK_BLOCK) {
        status = by->block((char *)values + (size_t)i * by->item, (first + i) / GCK_BLOCK,
                           gck_groups_of(smaller(count - i, GCK_BLOCK)), by->ctx);
    }
    return status;
}

int gck_encode_blocks(const gck_tensor *x, int64_t first, int64_t last, gck_block *block, void *ctx)
{
    return each_piece(x, GCK_BLOCK, first, last, 1, 1, each_block, &(by_blocks){gck_itemsize(x->dtype), block, ctx});
}

void gck_decode_blocks(const gck_tensor *out, int64_t first, int64_t last, gck_block *block, void *ctx)
{
    each_piece(out, GCK_BLOCK, first, last, 1, 0, each_block, &(by_blocks){gck_itemsize(out->dtype), block, ctx});
}
