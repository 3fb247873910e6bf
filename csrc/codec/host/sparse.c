/* sparse.c: the codec sparse: bit-exact, one bit for each value and the words of those that are not
 * zero.  format/sparse.h is the format. */
#include "codec/cuda/cuda_entry.h"
#include "codec/host/nonzeros.h"
#include "codec/host/pieces.h"
#include "codec/host/strided.h"

GCK_DECLARE_CUDA(sparse)

typedef struct {
    gck_dtype        dtype;
    gck_sparse_parts parts;
} work;

static gck_sparse_parts parts_of(const gck_tensor *x, const void *payload)
{
    return gck_sparse_parts_of(payload, x->numel, x->dtype, x->room);
}

/* The words whose bits are set, one after the other. */
#define PACK(type)                                                         \
    for (type *to = out; bits != 0; bits &= bits - 1) {                    \
        *to++ = ((const type *)values)[gck_lowest_bit(bits)];              \
    }
#define UNPACK(type)                                                       \
    for (const type *from = packed; bits != 0; bits &= bits - 1) {         \
        ((type *)values)[gck_lowest_bit(bits)] = *from++;                  \
    }

static void pack_words(const void *values, size_t item, uint64_t bits, void *out)
{
    if (bits == ~(uint64_t)0) {
        memcpy(out, values, 64 * item);
    } else if (item == sizeof(uint32_t)) {
        PACK(uint32_t)
    } else {
        PACK(uint16_t)
    }
}

static void unpack_words(const void *packed, size_t item, uint64_t bits, void *values)
{
    if (bits == ~(uint64_t)0) {
        memcpy(values, packed, 64 * item);
        return;
    }
    memset(values, 0, 64 * item);
    if (item == sizeof(uint32_t)) {
        UNPACK(uint32_t)
    } else {
        UNPACK(uint16_t)
    }
}

/* `groups` of one block.  The values may have changed since they were counted: no more are stored than
 * there was room for. */
static int encode_block(const work *w, const char *values, int64_t block, int64_t groups)
{
    const size_t item = gck_itemsize(w->dtype);
    const int last = (block + 1) * GCK_BLOCK_GROUPS * GCK_BITMAP >= (const uint8_t *)w->parts.before - w->parts.bitmap;
    const int64_t end = last ? w->parts.room : (int64_t)w->parts.before[block + 1];
    int64_t at = (int64_t)w->parts.before[block];
    uint8_t *bitmap = w->parts.bitmap + block * GCK_BLOCK_GROUPS * GCK_BITMAP;

    for (int64_t i = 0; i < 2 * groups; i++, values += 64 * item) {
        const uint64_t bits = gck_nonzeros_of(values, w->dtype);
        const int count = gck_popcount(bits);
        if (count > end - at) {
            return GCK_E_OVERFLOW;
        }
        memcpy(bitmap + i * (int64_t)sizeof bits, &bits, sizeof bits);
        pack_words(values, item, bits, w->parts.values + (size_t)at * item);
        at += count;
    }
    return GCK_OK;
}

static int encode_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const work *w = ctx;
    int status = GCK_OK;

    (void)streaming;
    for (int64_t i = 0; i < count && status == GCK_OK; i += GCK_BLOCK) {
        const int64_t left = count - i < GCK_BLOCK ? count - i : GCK_BLOCK;
        status = encode_block(w, (const char *)values + (size_t)i * gck_itemsize(w->dtype), (first + i) / GCK_BLOCK,
                              gck_groups_of(left));
    }
    return status;
}

static void decode_block(const work *w, char *values, int64_t block, int64_t groups)
{
    const size_t item = gck_itemsize(w->dtype);
    const uint8_t *bitmap = w->parts.bitmap + block * GCK_BLOCK_GROUPS * GCK_BITMAP;
    const uint8_t *packed = w->parts.values + (size_t)w->parts.before[block] * item;
    const uint32_t nan = gck_quiet_nan(w->dtype);
    const int fits = gck_sparse_fits(w->parts.before[block], gck_count_bits(bitmap, groups), w->parts.room);
    uint32_t nans[64];
    uint64_t bits;

    for (int i = 0; i < 64; i++) {
        nans[i] = w->dtype == GCK_F32 ? nan : nan | nan << 16;
    }
    for (int64_t i = 0; i < 2 * groups; i++, values += 64 * item) {
        memcpy(&bits, bitmap + i * (int64_t)sizeof bits, sizeof bits);
        unpack_words(fits ? (const void *)packed : nans, item, bits, values);
        packed += fits ? (size_t)gck_popcount(bits) * item : 0;
    }
}

static int decode_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const work *w = ctx;

    (void)streaming;
    for (int64_t i = 0; i < count; i += GCK_BLOCK) {
        const int64_t left = count - i < GCK_BLOCK ? count - i : GCK_BLOCK;
        decode_block(w, (char *)values + (size_t)i * gck_itemsize(w->dtype), (first + i) / GCK_BLOCK,
                     gck_groups_of(left));
    }
    return GCK_OK;
}

int64_t gck_sparse_count(const gck_tensor *x, void *payload, int64_t first, int64_t last)
{
    return gck_count_nonzeros(x, payload != NULL ? parts_of(x, payload).before : NULL, first, last);
}

int gck_sparse_place(const gck_tensor *x, void *payload)
{
    const gck_sparse_parts parts = parts_of(x, payload);

    return gck_place_nonzeros(parts.before, x->numel, parts.room);
}

int gck_sparse_encode(const gck_tensor *x, void *payload, int64_t first, int64_t last)
{
    work w = {x->dtype, parts_of(x, payload)};

    return gck_encode_pieces(x, GCK_BLOCK, first, last, encode_piece, &w);
}

void gck_sparse_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last)
{
    work w = {out->dtype, parts_of(out, payload)};

    gck_decode_pieces(out, GCK_BLOCK, first, last, decode_piece, &w);
}

/* ---- the codec ---- */

/* Values of blocks [first, last) of a payload that is the tensor. */
static int64_t values_of(const gck_tensor *x, int64_t first, int64_t last)
{
    const int64_t left = x->numel - first * GCK_BLOCK, most = (last - first) * GCK_BLOCK;

    return left < most ? left : most;
}

static int is_whole(const gck_tensor *x) { return x->room == 0 || x->room >= x->numel * (int64_t)gck_itemsize(x->dtype); }

static int sparse_encode(const gck_tensor *x, void *payload, const gck_how *how, int64_t first, int64_t last)
{
    const size_t block = GCK_BLOCK * gck_itemsize(x->dtype);

    (void)how;
    if (!is_whole(x)) {
        return gck_sparse_encode(x, payload, first, last);
    }
    gck_gather(x, first * GCK_BLOCK, values_of(x, first, last), (char *)payload + (size_t)first * block);
    return GCK_OK;
}

static void sparse_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last)
{
    const size_t block = GCK_BLOCK * gck_itemsize(out->dtype);

    if (!is_whole(out)) {
        gck_sparse_decode(payload, out, first, last);
    } else {
        gck_scatter(out, first * GCK_BLOCK, values_of(out, first, last), (const char *)payload + (size_t)first * block);
    }
}

static const gck_counted counted = {gck_sparse_count, gck_sparse_place, gck_sparse_nbytes, 0};

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
