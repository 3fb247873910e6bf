/* group_codecs.c: the codecs that are groups of 128 values: one per row of codecs.h. */
#include "codec/cuda/cuda_entry.h"
#include "codec/host/cpu_features.h"
#include "codec/host/pieces.h"

typedef struct {
    gck_format        format;
    const gck_tensor *tensor;
    void             *payload;
    const gck_dither *dither;
} work;

/* The address of the codes of group g in a payload, and of the words beside them. */
static uint8_t *codes_at(const work *w, int64_t g) { return (uint8_t *)w->payload + g * gck_code_bytes(w->format); }

static uint16_t *side_at(const work *w, int64_t g)
{
    return (uint16_t *)codes_at(w, gck_groups_of(w->tensor->numel)) + g * gck_side_words(w->format);
}

static int encode_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const work *w = ctx;
    const int64_t g = first / GCK_GROUP, n = gck_groups_of(count);
    const gck_dtype dtype = w->tensor->dtype;

    if (w->dither != NULL) {
        GCK_KERNEL(encode_noisy[w->format][dtype])(values, n, codes_at(w, g), side_at(w, g), w->dither, g);
    } else {
        GCK_KERNEL(encode[w->format][dtype])(values, n, codes_at(w, g), side_at(w, g), g, streaming);
    }
    return GCK_OK;
}

static int decode_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const work *w = ctx;
    const int64_t g = first / GCK_GROUP;

    GCK_KERNEL(decode[w->format][w->tensor->dtype])(codes_at(w, g), side_at(w, g), gck_groups_of(count), values, g,
                                                    streaming);
    return GCK_OK;
}

/* Bytes per group: codes, and the words beside them. */
#define GROUP_SIZE(bits, words) {0, GCK_GROUP / 8 * (bits) + 2 * (words), 0}

#define DEFINE(_, codec, id, format, simd, cuda, words_for_users, error, bits, words, ...)              \
    GCK_DECLARE_CUDA(codec)                                                                             \
    static int codec##_encode(const gck_tensor *x, void *payload, const gck_how *how, int64_t first,    \
                              int64_t last)                                                             \
    {                                                                                                   \
        work w = {format, x, payload, how != NULL ? how->dither : NULL};                                \
        return gck_encode_pieces(x, GCK_GROUP, first, last, encode_piece, &w);                          \
    }                                                                                                   \
    static void codec##_decode(const void *payload, const gck_tensor *out, int64_t first, int64_t last) \
    {                                                                                                   \
        work w = {format, out, (void *)payload, NULL};                                                  \
        gck_decode_pieces(out, GCK_GROUP, first, last, decode_piece, &w);                               \
    }                                                                                                   \
    const gck_codec gck_codec_##codec = {                                                               \
        .name = #codec,                                                                                 \
        .summary = words_for_users,                                                                     \
        .dtypes = GCK_FLOATS,                                                                           \
        .max_error = error,                                                                             \
        .size = {[GCK_F32] = GROUP_SIZE(bits, words), [GCK_F16] = GROUP_SIZE(bits, words),              \
                 [GCK_BF16] = GROUP_SIZE(bits, words)},                                                 \
        .unit = GCK_GROUP,                                                                              \
        .stochastic = 1,                                                                                \
        .encode_host = codec##_encode,                                                                  \
        .decode_host = codec##_decode,                                                                  \
        .encode = GCK_##cuda(gck_##codec##_encode_cuda),                                                \
        .decode = GCK_##cuda(gck_##codec##_decode_cuda),                                                \
    };
GCK_GROUP_CODECS(DEFINE, _)
