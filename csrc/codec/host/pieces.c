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

int gck_encode_pieces(const gck_tensor *x, int64_t unit, int64_t first, int64_t last, int in_place, gck_piece *piece,
                      void *ctx)
{
    const size_t item = gck_itemsize(x->dtype);
    const int64_t end = smaller(last * unit, x->numel), direct = in_place ? values_in_place(x, unit, first, last) : 0;
    int status = GCK_OK;
    _Alignas(64) char buffer[GCK_BLOCK * sizeof(float)];

    if (direct > 0) {
        status = piece((char *)x->data + (size_t)(first * unit) * item, first * unit, direct, x->numel >= STREAM_ENCODE,
                       ctx);
    }
    for (int64_t i = first * unit + direct; i < end; i += GCK_BLOCK) {
        const int64_t count = smaller(end - i, GCK_BLOCK), padding = -count & (GCK_GROUP - 1);
        gck_gather(x, i, count, buffer);
        memset(buffer + (size_t)count * item, 0, (size_t)padding * item);
        const int answer = piece(buffer, i, count, 0, ctx);
        status = answer != GCK_OK ? answer : status;
    }
    return status;
}

void gck_decode_pieces(const gck_tensor *out, int64_t unit, int64_t first, int64_t last, int in_place,
                       gck_piece *piece, void *ctx)
{
    const size_t item = gck_itemsize(out->dtype);
    const int64_t end = smaller(last * unit, out->numel);
    const int64_t direct = in_place ? values_in_place(out, unit, first, last) : 0;
    _Alignas(64) char buffer[GCK_BLOCK * sizeof(float)];

    if (direct > 0) {
        piece((char *)out->data + (size_t)(first * unit) * item, first * unit, direct,
              out->numel * (int64_t)item >= STREAM_DECODE, ctx);
    }
    for (int64_t i = first * unit + direct; i < end; i += GCK_BLOCK) {
        const int64_t count = smaller(end - i, GCK_BLOCK);
        piece(buffer, i, count, 0, ctx);
        gck_scatter(out, i, count, buffer);
    }
}
