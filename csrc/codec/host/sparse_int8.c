/* sparse_int8.c: the codec sparse_int8: one bit for each value, and int8 of those that are not zero.
 * format/sparse_int8.h is the format; the kernels of int8_plain do the work. */
#include "codec/cuda/cuda_device.h"
#include "codec/format/sparse_int8.h"
#include "codec/host/cpu_features.h"
#include "codec/host/pieces.h"
#include "codec/host/sparse_payload.h"
#include "codec/portable/nonzeros_portable.h"

GCK_DECLARE_CUDA(sparse_int8)

typedef struct {
    gck_dtype        dtype;
    int64_t          blocks;
    gck_sparse_parts parts;
} work;

/* The values of a block that are not zero, and what stands for them. */
typedef struct {
    _Alignas(64) char    values[GCK_BLOCK * sizeof(float)];
    _Alignas(64) uint8_t codes[GCK_BLOCK];
    uint16_t             side[GCK_BLOCK_GROUPS];
} block_buffer;

static int64_t nbytes_of(int64_t numel, gck_dtype dtype, int64_t values)
{
    (void)dtype;
    return gck_sparse_head(numel) + gck_packed_nbytes(values, gck_blocks_of(numel));
}

static gck_sparse_parts parts_of(const gck_tensor *x, const void *payload)
{
    const int64_t most = nbytes_of(x->numel, x->dtype, x->numel);

    return gck_sparse_int8_parts_of(payload, x->numel, x->room != 0 ? x->room : most);
}

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* A group in form B again, in form A. */
static void encode_group(const void *values, gck_dtype dtype, int64_t count, uint8_t *codes, uint16_t *side)
{
    float amax = 0.f;

    for (int64_t i = 0; i < count; i++) {
        const float v = gck_load(values, dtype, i);
        amax = !gck_escapes(v, dtype) && gck_abs(v) > amax ? gck_abs(v) : amax;
    }
    const gck_packed_scale scale = gck_packed_scale_of(amax, 1);
    for (int64_t i = 0; i < count; i++) {
        codes[i] = gck_packed_code_of(gck_load(values, dtype, i), dtype, scale);
    }
    *side = (uint16_t)scale.side;
}

/* What is not zero keeps its sign. */
static void keep_signs(const void *values, gck_dtype dtype, int64_t count, uint8_t *codes)
{
    const size_t item = gck_itemsize(dtype);
    const uint8_t *top = (const uint8_t *)values + item - 1;     /* of little-endian words */

    for (int64_t i = 0; i < count; i++) {
        const uint8_t least = top[(size_t)i * item] & 0x80u ? 0xFFu : 1u;
        codes[i] = codes[i] == 0 ? least : codes[i];
    }
}

/* The bitmap of a block, and its values one after the other: how many. */
static int64_t pack_values(const char *values, gck_dtype dtype, int64_t runs, uint8_t *bitmap, char *to)
{
    const size_t item = gck_itemsize(dtype);
    int64_t count = 0;

    for (int64_t i = 0; i < runs; i++, values += GCK_RUN * item) {
        const uint64_t bits = gck_nonzeros_of(values, dtype, 1);
        memcpy(bitmap + i * (int64_t)sizeof bits, &bits, sizeof bits);
        gck_pack_run(values, item, bits, to + (size_t)count * item);
        count += gck_popcount(bits);
    }
    return count;
}

static int encode_block(void *values, int64_t block, int64_t groups, void *ctx)
{
    const work *w = ctx;
    block_buffer buffer, *b = &buffer;
    const size_t item = gck_itemsize(w->dtype);
    const int64_t before = (int64_t)w->parts.before[block];
    const int64_t most = (block + 1 < w->blocks ? (int64_t)w->parts.before[block + 1] : w->parts.room) - before;
    uint8_t *bitmap = w->parts.bitmap + block * GCK_BLOCK_GROUPS * GCK_BITMAP;
    uint8_t *to = w->parts.values + gck_packed_place(before, block);
    /* faster: of sparse, for which -0 is a value; then they are more than were counted */
    int64_t count = GCK_KERNEL(pack_nonzeros[w->dtype])(values, 2 * groups, bitmap, b->values, GCK_BLOCK);

    if (count != most) {
        count = pack_values(values, w->dtype, 2 * groups, bitmap, b->values);
    }
    if (count > most) {
        return GCK_E_OVERFLOW;                     /* the values have changed since they were counted */
    }
    memset(b->values + (size_t)count * item, 0, (size_t)(-count & (GCK_GROUP - 1)) * item);
    GCK_KERNEL(encode[GCK_INT8_PLAIN][w->dtype])(b->values, gck_groups_of(count), b->codes, b->side, 0, 0);
    for (int64_t first = 0; first < count; first += GCK_GROUP) {
        const int64_t n = lesser(count - first, GCK_GROUP);
        const char *own = b->values + (size_t)first * item;
        uint16_t *side = &b->side[first / GCK_GROUP];
        if (*side == GCK_ESC_TABLE) {
            encode_group(own, w->dtype, n, b->codes + first, side);
        } else {
            keep_signs(own, w->dtype, n, b->codes + first);
        }
        memcpy(to, side, sizeof *side);
        memcpy(to + sizeof *side, b->codes + first, (size_t)n);
        to += (int64_t)sizeof *side + n;
    }
    memset(to, 0, (size_t)(w->parts.values + gck_packed_end(before, count, block, w->blocks) - to));
    return GCK_OK;
}

/* Values that their dtype rounds to zero. */
static void keep_values(void *values, gck_dtype dtype, int64_t count, const uint8_t *codes)
{
    uint32_t *words = values;
    uint16_t *halves = values;

    if (gck_count_words(values, count, dtype, 1) == count) {   /* faster: few blocks have such values */
        return;
    }
    for (int64_t i = 0; i < count && dtype == GCK_F32; i++) {
        words[i] = (words[i] & 0x7FFFFFFFu) == 0 && codes[i] != 0 ? gck_least_bits(codes[i] >> 7, dtype) : words[i];
    }
    for (int64_t i = 0; i < count && dtype != GCK_F32; i++) {
        halves[i] = (halves[i] & 0x7FFFu) == 0 && codes[i] != 0 ? (uint16_t)gck_least_bits(codes[i] >> 7, dtype)
                                                                 : halves[i];
    }
}

static int decode_block(void *values, int64_t block, int64_t groups, void *ctx)
{
    const work *w = ctx;
    block_buffer buffer, *b = &buffer;
    const uint8_t *bitmap = w->parts.bitmap + block * GCK_BLOCK_GROUPS * GCK_BITMAP;
    const uint64_t before = w->parts.before[block];
    const int64_t count = gck_count_bits(bitmap, groups);

    if (!gck_sparse_fits(before, count, w->parts.room)) {
        gck_decode_nans(bitmap, groups, w->dtype, values);
        return GCK_OK;
    }
    const uint8_t *from = w->parts.values + gck_packed_place((int64_t)before, block);
    for (int64_t first = 0; first < count; first += GCK_GROUP) {
        const int64_t n = lesser(count - first, GCK_GROUP);
        uint16_t side;
        memcpy(&side, from, sizeof side);
        b->side[first / GCK_GROUP] = (uint16_t)gck_packed_side(side);
        memcpy(b->codes + first, from + sizeof side, (size_t)n);
        memset(b->codes + first + n, 0, (size_t)(GCK_GROUP - n));
        from += (int64_t)sizeof side + n;
    }
    GCK_KERNEL(decode[GCK_INT8_PLAIN][w->dtype])(b->codes, b->side, gck_groups_of(count), b->values, 0, 0);
    keep_values(b->values, w->dtype, count, b->codes);
    GCK_KERNEL(unpack_nonzeros[w->dtype])(bitmap, b->values, GCK_BLOCK, 2 * groups, values);
    return GCK_OK;
}

static int sparse_int8_encode(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first, int64_t last)
{
    work w = {x->dtype, gck_blocks_of(x->numel), parts_of(x, to.codes)};

    (void)how;
    return gck_encode_blocks(x, first, last, encode_block, &w);
}

static void sparse_int8_decode(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last)
{
    work w = {out->dtype, gck_blocks_of(out->numel), parts_of(out, from.codes)};

    gck_decode_blocks(out, first, last, decode_block, &w);
}

static int64_t count_values(const gck_tensor *x, void *payload, int64_t first, int64_t last)
{
    return gck_count_nonzeros(x, payload != NULL ? parts_of(x, payload).before : NULL, 1, first, last);
}

static int place_values(const gck_tensor *x, void *payload)
{
    const gck_sparse_parts parts = parts_of(x, payload);

    return gck_place_nonzeros(parts.before, x->numel, parts.room);
}

static const gck_counted counted = {
    .count = count_values,
    .place = place_values,
    .nbytes = nbytes_of,
    .always = 1,
};

/* All values are packed.  An error is less than a step, of an amax of 125 steps, which are rounded up. */
#define LARGEST {1, GCK_BITMAP + 2, 8 + 2}

const gck_codec gck_codec_sparse_int8 = {
    .name = "sparse_int8",
    .summary = "one bit per value, and int8 of the values that are not zero, with their signs",
    .dtypes = GCK_FLOATS,
    .max_error = 1.0 / 125 * (1 + 0x1p-6),
    .size = {[GCK_F32] = LARGEST, [GCK_F16] = LARGEST, [GCK_BF16] = LARGEST},
    .counted = &counted,
    .unit = GCK_BLOCK,
    .may_overflow = 1,
    .encode_host = sparse_int8_encode,
    .decode_host = sparse_int8_decode,
    .encode = GCK_CUDA(gck_sparse_int8_encode_cuda),
    .decode = GCK_CUDA(gck_sparse_int8_decode_cuda),
};
