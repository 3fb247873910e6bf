/* sparse_payload.c: counts and bitmaps of any tensor, block by block, and the payload of sparse.h. */
#include "codec/host/sparse_payload.h"

#include "codec/host/cpu_features.h"
#include "codec/host/pieces.h"
#include "codec/portable/nonzeros_portable.h"

typedef struct {
    gck_dtype dtype;
    int       unsigned_zeros;
    uint64_t *before;
    int64_t   sum;
} counting;

static int count_block(void *values, int64_t block, int64_t groups, void *ctx)
{
    counting *c = ctx;
    const int64_t found = gck_count_words(values, groups * GCK_GROUP, c->dtype, c->unsigned_zeros);

    c->sum += found;
    if (c->before != NULL) {
        c->before[block] = (uint64_t)found;
    }
    return GCK_OK;
}

int64_t gck_count_nonzeros(const gck_tensor *x, uint64_t *before, int unsigned_zeros, int64_t first, int64_t last)
{
    counting c = {x->dtype, unsigned_zeros, before, 0};

    gck_encode_blocks(x, first, last, count_block, &c);
    return c.sum;
}

int gck_place_nonzeros(uint64_t *before, int64_t numel, int64_t room)
{
    uint64_t sum = 0;

    for (int64_t b = 0; b < gck_blocks_of(numel); b++) {
        const uint64_t count = before[b];
        before[b] = sum;
        sum += count;
    }
    return sum <= (uint64_t)room ? GCK_OK : GCK_E_OVERFLOW;
}

int gck_count_bits(const uint8_t *bitmap, int64_t groups)
{
    uint64_t word;
    int sum = 0;

    for (int64_t i = 0; i < groups * GCK_BITMAP; i += (int64_t)sizeof word) {
        memcpy(&word, bitmap + i, sizeof word);
        sum += gck_popcount(word);
    }
    return sum;
}

/* ---- the payload of sparse.h ---- */

typedef struct {
    gck_dtype        dtype;
    gck_sparse_parts parts;
} work;

static gck_sparse_parts parts_of(const gck_tensor *x, const void *payload)
{
    return gck_sparse_parts_of(payload, x->numel, x->dtype, x->room);
}

/* `groups` of one block.  The values may have changed since they were counted: those
 * without room are not stored. */
static int encode_block(void *values, int64_t block, int64_t groups, void *ctx)
{
    const work *w = ctx;
    const int last = (block + 1) * GCK_BLOCK_GROUPS * GCK_BITMAP >= (const uint8_t *)w->parts.before - w->parts.bitmap;
    const int64_t at = (int64_t)w->parts.before[block];
    const int64_t end = last ? w->parts.room : (int64_t)w->parts.before[block + 1];

    return GCK_KERNEL(pack_nonzeros[w->dtype])(values, 2 * groups,
                                               w->parts.bitmap + block * GCK_BLOCK_GROUPS * GCK_BITMAP,
                                               w->parts.values + (size_t)at * gck_itemsize(w->dtype), end - at) < 0
        ? GCK_E_OVERFLOW : GCK_OK;
}

void gck_decode_nans(const uint8_t *bitmap, int64_t groups, gck_dtype dtype, void *values)
{
    const size_t item = gck_itemsize(dtype);
    const uint32_t nan = gck_quiet_nan(dtype) | (dtype == GCK_F32 ? 0u : gck_quiet_nan(dtype) << 16);
    uint32_t nans[GCK_RUN];
    uint64_t bits;

    for (int i = 0; i < GCK_RUN; i++) {
        nans[i] = nan;
    }
    for (int64_t i = 0; i < 2 * groups; i++) {
        memcpy(&bits, bitmap + i * (int64_t)sizeof bits, sizeof bits);
        gck_unpack_run(nans, item, bits, (char *)values + (size_t)(i * GCK_RUN) * item);
    }
}

static int decode_block(void *values, int64_t block, int64_t groups, void *ctx)
{
    const work *w = ctx;
    const uint8_t *bitmap = w->parts.bitmap + block * GCK_BLOCK_GROUPS * GCK_BITMAP;
    const uint64_t before = w->parts.before[block];

    if (gck_sparse_fits(before, gck_count_bits(bitmap, groups), w->parts.room)) {
        GCK_KERNEL(unpack_nonzeros[w->dtype])(bitmap, w->parts.values + (size_t)before * gck_itemsize(w->dtype),
                                              w->parts.room - (int64_t)before, 2 * groups, values);
    } else {
        gck_decode_nans(bitmap, groups, w->dtype, values);
    }
    return GCK_OK;
}

int64_t gck_sparse_count(const gck_tensor *x, void *payload, int64_t first, int64_t last)
{
    return gck_count_nonzeros(x, payload != NULL ? parts_of(x, payload).before : NULL, 0, first, last);
}

int gck_sparse_place(const gck_tensor *x, void *payload)
{
    const gck_sparse_parts parts = parts_of(x, payload);

    return gck_place_nonzeros(parts.before, x->numel, parts.room);
}

int gck_sparse_encode(const gck_tensor *x, void *payload, int64_t first, int64_t last)
{
    work w = {x->dtype, parts_of(x, payload)};

    return gck_encode_blocks(x, first, last, encode_block, &w);
}

void gck_sparse_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last)
{
    work w = {out->dtype, parts_of(out, payload)};

    gck_decode_blocks(out, first, last, decode_block, &w);
}
