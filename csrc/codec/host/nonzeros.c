/* nonzeros.c: which values are not zero, and those.
 *
 * Counts and bitmaps by words of 64 bits.  Every x86-64 has SSE2, which makes bitmaps three
 * times as fast; wider vectors gain nothing more (docs/codecs.md). */
#include "codec/host/nonzeros.h"

#include "codec/host/pieces.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__SSE2__)

static inline __m128i zeros_of(const void *values, int i, gck_dtype dtype)
{
    const __m128i v = _mm_loadu_si128((const __m128i *)values + i), zero = _mm_setzero_si128();

    return dtype == GCK_F32 ? _mm_cmpeq_epi32(v, zero) : _mm_cmpeq_epi16(v, zero);
}

uint64_t gck_nonzeros_of(const void *values, gck_dtype dtype)
{
    uint64_t zeros = 0;

    for (int i = 0; i < 4; i++) {
        const __m128i words = dtype == GCK_F32
            ? _mm_packs_epi16(_mm_packs_epi32(zeros_of(values, 4 * i, dtype), zeros_of(values, 4 * i + 1, dtype)),
                              _mm_packs_epi32(zeros_of(values, 4 * i + 2, dtype), zeros_of(values, 4 * i + 3, dtype)))
            : _mm_packs_epi16(zeros_of(values, 2 * i, dtype), zeros_of(values, 2 * i + 1, dtype));
        zeros |= (uint64_t)(uint32_t)_mm_movemask_epi8(words) << (16 * i);
    }
    return ~zeros;
}

/* How many of `count` values, a multiple of 128 up to GCK_BLOCK. */
static int64_t count_of_block(const void *values, int64_t count, gck_dtype dtype)
{
    const int n = (int)(count * (int64_t)gck_itemsize(dtype) / (int64_t)sizeof(__m128i));
    __m128i zeros[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
    uint32_t word[4];
    uint64_t sum = 0;

    for (int i = 0; i < n; i += 2) {                           /* of words, each up to 1024: -1 for a zero */
        for (int k = 0; k < 2; k++) {
            const __m128i found = zeros_of(values, i + k, dtype);
            zeros[k] = dtype == GCK_F32 ? _mm_sub_epi32(zeros[k], found) : _mm_sub_epi16(zeros[k], found);
        }
    }
    _mm_storeu_si128((__m128i *)(void *)word, _mm_add_epi16(zeros[0], zeros[1]));
    for (int i = 0; i < 4; i++) {
        sum += dtype == GCK_F32 ? word[i] : (word[i] & 0xFFFFu) + (word[i] >> 16);
    }
    return count - (int64_t)sum;
}

#else

/* The sign bits of the words in w that are not zero: two words of 32 bits, or four of 16. */
static inline uint64_t signs_of_nonzeros(uint64_t w, uint64_t rest)
{
    return (((w & rest) + rest) | w) & ~rest;
}

enum { WORDS_OF_64 = 64 };
static const uint64_t rest32 = 0x7FFFFFFF7FFFFFFFu, rest16 = 0x7FFF7FFF7FFF7FFFu;

uint64_t gck_nonzeros_of(const void *values, gck_dtype dtype)
{
    const char *at = values;
    uint64_t bits = 0, w;

    if (dtype == GCK_F32) {
        for (int i = 0; i < WORDS_OF_64; i += 2, at += sizeof w) {
            memcpy(&w, at, sizeof w);
            w = signs_of_nonzeros(w, rest32);
            bits |= ((w >> 31 & 1u) | w >> 62) << i;
        }
        return bits;
    }
    for (int i = 0; i < WORDS_OF_64; i += 4, at += sizeof w) {
        memcpy(&w, at, sizeof w);
        w = signs_of_nonzeros(w, rest16) >> 15;
        bits |= (w * 0x0001000200040008u >> 48 & 15u) << i;    /* bits 0, 16, 32, 48 side by side */
    }
    return bits;
}

/* How many of `count` values, a multiple of 128 up to GCK_BLOCK. */
static int64_t count_of_block(const void *values, int64_t count, gck_dtype dtype)
{
    const char *at = values;
    uint64_t sum = 0, w;

    if (dtype == GCK_F32) {
        for (int64_t i = 0; i < count; i += 2, at += sizeof w) {
            memcpy(&w, at, sizeof w);
            sum += signs_of_nonzeros(w, rest32) >> 31;         /* two sums side by side */
        }
        return (int64_t)((sum & 0xFFFFFFFFu) + (sum >> 32));
    }
    for (int64_t i = 0; i < count; i += 4, at += sizeof w) {
        memcpy(&w, at, sizeof w);
        sum += signs_of_nonzeros(w, rest16) >> 15;             /* four */
    }
    return (int64_t)((sum & 0xFFFFu) + (sum >> 16 & 0xFFFFu) + (sum >> 32 & 0xFFFFu) + (sum >> 48));
}

#endif

typedef struct {
    gck_dtype dtype;
    uint64_t *before;
    int64_t   sum;
} counting;

static int count_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    counting *c = ctx;
    const size_t item = gck_itemsize(c->dtype);

    (void)streaming;
    for (int64_t i = 0; i < count; i += GCK_BLOCK) {
        const int64_t left = count - i, n = left < GCK_BLOCK ? left : GCK_BLOCK;
        const int64_t whole = gck_groups_of(n) * GCK_GROUP;    /* a piece is padded with zeros */
        const int64_t found = count_of_block((const char *)values + (size_t)i * item, whole, c->dtype);
        c->sum += found;
        if (c->before != NULL) {
            c->before[(first + i) / GCK_BLOCK] = (uint64_t)found;
        }
    }
    return GCK_OK;
}

int64_t gck_count_nonzeros(const gck_tensor *x, uint64_t *before, int64_t first, int64_t last)
{
    counting c = {x->dtype, before, 0};

    gck_encode_pieces(x, GCK_BLOCK, first, last, count_piece, &c);
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

/* Without an instruction for it, which not every x86-64 has, and faster than gcc's table. */
int gck_popcount(uint64_t bits)
{
    bits -= bits >> 1 & 0x5555555555555555u;
    bits = (bits & 0x3333333333333333u) + (bits >> 2 & 0x3333333333333333u);
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
    return (int)(bits * 0x0101010101010101u >> 56);
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
