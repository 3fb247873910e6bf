/* group_codecs.c: the codecs that are groups of 128 values: one per row of codecs.h. */
#include "codec/cuda/cuda_device.h"
#include "codec/format/rows.h"
#include "codec/host/cpu_features.h"
#include "codec/host/pieces.h"

typedef struct {
    gck_format        format;
    const gck_tensor *tensor;
    gck_bytes         payload;
    const gck_dither *dither;
    int64_t           row;       /* gck_row(), of formats that scale rows apart; else 0 */
} operands;

static operands operands_of(gck_format format, const gck_tensor *tensor, gck_bytes payload, const gck_how *how)
{
    return (operands){format, tensor, payload, how != NULL ? how->dither : NULL,
                  gck_scales_rows(format) ? gck_row(tensor) : 0};
}

/* The address of the codes of group g in a payload, and of the words beside them. */
static uint8_t *codes_at(const operands *w, int64_t g)
{
    return (uint8_t *)w->payload.codes + g * gck_code_bytes(w->format);
}

static uint16_t *side_at(const operands *w, int64_t g)
{
    return (uint16_t *)w->payload.scales + g * gck_side_words(w->format);
}

/* The bytes of the rows come after those words. */
static int8_t *rows_of(const operands *w) { return (int8_t *)side_at(w, gck_groups_of(w->tensor->numel)); }

/* Scale the shares of the groups in a buffer, which begins with group g, and write what was done; or undo it. */
static void scale_rows(const operands *w, void *buffer, int64_t g, int64_t ngroups, int back)
{
    const gck_dtype dtype = w->tensor->dtype;
    int8_t *rows = rows_of(w);

    for (int64_t i = 0; i < ngroups; i++) {
        char *values = (char *)buffer + (size_t)i * GCK_GROUP * gck_itemsize(dtype);
        int end[GCK_SHARES], shift[GCK_SHARES] = {0};
        int64_t row;
        const int n = gck_shares_of(g + i, w->row, w->tensor->numel, end, &row);
        if (!back && row * w->row == (g + i) * GCK_GROUP) {
            rows[row] = 0;                       /* it begins with the group */
        }
        if (n == 1) {
            continue;
        }
        if (back) {
            gck_shifts_from(n, rows + row + 1, shift);
            gck_scale_shares(values, dtype, n, end, shift, 1);
        } else {
            if (gck_find_shifts(values, dtype, n, end, shift)) {
                gck_scale_shares(values, dtype, n, end, shift, 0);
            }
            for (int s = 1; s < n; s++) {
                rows[row + s] = (int8_t)(shift[s] - shift[s - 1]);
            }
        }
    }
}

static int encode_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const operands *w = ctx;
    const int64_t g = first / GCK_GROUP, n = gck_groups_of(count);
    const gck_dtype dtype = w->tensor->dtype;

    if (w->row > 0) {
        scale_rows(w, values, g, n, 0);
    }
    if (w->dither != NULL) {
        GCK_KERNEL(encode_noisy[w->format][dtype])(values, n, codes_at(w, g), side_at(w, g), w->dither, g);
    } else {
        GCK_KERNEL(encode[w->format][dtype])(values, n, codes_at(w, g), side_at(w, g), g, streaming);
    }
    return GCK_OK;
}

static int decode_piece(void *values, int64_t first, int64_t count, int streaming, void *ctx)
{
    const operands *w = ctx;
    const int64_t g = first / GCK_GROUP, n = gck_groups_of(count);

    GCK_KERNEL(decode[w->format][w->tensor->dtype])(codes_at(w, g), side_at(w, g), n, values, g, streaming);
    if (w->row > 0) {
        scale_rows(w, values, g, n, 1);
    }
    return GCK_OK;
}

/* Bytes of a group: of its codes, and beside them; and of a row. */
#define GROUP_SIZE(bits, words, rows) {0, GCK_GROUP / 8 * (bits), 0, 2 * (words), rows}

#define DEFINE(_, codec, id, format, simd, cuda, bits, words, rows, words_for_users, error, ...)         \
    GCK_DECLARE_CUDA(codec)                                                                              \
    static int codec##_encode(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first,      \
                              int64_t last)                                                              \
    {                                                                                                    \
        operands w = operands_of(format, x, to, how);                                                            \
        return gck_encode_pieces(x, GCK_GROUP, first, last, w.row == 0, encode_piece, &w);               \
    }                                                                                                    \
    static void codec##_decode(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last)       \
    {                                                                                                    \
        operands w = operands_of(format, out, from, NULL);                                                       \
        gck_decode_pieces(out, GCK_GROUP, first, last, w.row == 0, decode_piece, &w);                    \
    }                                                                                                    \
    const gck_codec gck_codec_##codec = {                                                                \
        .name = #codec,                                                                                  \
        .summary = words_for_users,                                                                      \
        .dtypes = GCK_FLOATS,                                                                            \
        .max_error = error,                                                                              \
        .size = {[GCK_F32] = GROUP_SIZE(bits, words, rows), [GCK_F16] = GROUP_SIZE(bits, words, rows),   \
                 [GCK_BF16] = GROUP_SIZE(bits, words, rows)},                                            \
        .unit = GCK_GROUP,                                                                               \
        .stochastic = 1,                                                                                 \
        .encode_host = codec##_encode,                                                                   \
        .decode_host = codec##_decode,                                                                   \
        .encode = GCK_##cuda(gck_##codec##_encode_cuda),                                                 \
        .decode = GCK_##cuda(gck_##codec##_decode_cuda),                                                 \
    };
GCK_GROUP_CODECS(DEFINE, _)
