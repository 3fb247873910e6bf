/* lossless_portable.c: the kernels of lossless in portable C. */
#include "codec/portable/lossless_portable.h"

#include "codec/portable/kernels_portable.h"

static uint32_t word_at(const void *p, gck_dtype dtype, int i)
{
    return dtype == GCK_F32 ? ((const uint32_t *)p)[i] : ((const uint16_t *)p)[i];
}

static void put_word(void *p, gck_dtype dtype, int i, uint32_t word)
{
    if (dtype == GCK_F32) {
        ((uint32_t *)p)[i] = word;
    } else {
        ((uint16_t *)p)[i] = (uint16_t)word;
    }
}

/* How many of `n` exponents above 0 escape from a base. */
static int count_escapes(const uint8_t *with_exponent, int n, uint32_t base)
{
    for (uint32_t e = base - GCK_WINDOW + 1; e <= base; e++) {
        n -= with_exponent[e];
    }
    return n;
}

static uint32_t choose_base(const uint8_t *exponent, gck_dtype dtype)
{
    const uint32_t special = gck_special(dtype);
    uint8_t with_exponent[256] = {0};
    uint32_t top = 0;

    for (int i = 0; i < GCK_GROUP; i++) {
        with_exponent[exponent[i]]++;
        top = exponent[i] != special && exponent[i] > top ? exponent[i] : top;
    }
    const int n = GCK_GROUP - with_exponent[0];
    uint32_t base = gck_base_of(top == 0 && n > 0 ? special : top);
    int least = count_escapes(with_exponent, n, base);

    if (least <= 2) {
        return base;
    }
    for (uint32_t e = special; e > 0; e--) {
        const int escapes = with_exponent[e] != 0 ? count_escapes(with_exponent, n, gck_base_of(e)) : n;
        if (escapes < least) {
            least = escapes;
            base = gck_base_of(e);
        }
    }
    return base;
}

int gck_lossless_encode_group(const void *x, gck_dtype dtype, uint8_t *words, uint8_t *base, uint8_t *arena, int used)
{
    const int columns = gck_columns(dtype), spare = gck_spare_bits(dtype), width = gck_word_bits(dtype) - spare;
    uint8_t exponent[GCK_GROUP];
    uint32_t coded[GCK_GROUP];

    for (int i = 0; i < GCK_GROUP; i++) {
        coded[i] = gck_rotated(word_at(x, dtype, i), dtype);
        exponent[i] = (uint8_t)(coded[i] >> gck_low_bits(dtype));
    }
    *base = (uint8_t)choose_base(exponent, dtype);
    for (int i = 0; i < GCK_GROUP; i++) {
        coded[i] = gck_coded(coded[i], *base, dtype);
        if (gck_is_escaped(exponent[i], *base)) {
            if (used < GCK_ARENA) {
                arena[used] = exponent[i];
            }
            used++;
        }
    }
    for (int i = 0; i < gck_group_words(dtype); i++) {
        const uint32_t last = coded[gck_group_words(dtype) + i % columns];
        put_word(words, dtype, i, coded[i] | (last >> (i / columns * spare)) << width);
    }
    return used;
}

int gck_lossless_decode_group(const uint8_t *words, uint8_t base, const uint8_t *arena, int used, void *x,
                              gck_dtype dtype)
{
    const int columns = gck_columns(dtype), spare = gck_spare_bits(dtype), width = gck_word_bits(dtype) - spare;
    uint32_t coded[GCK_GROUP] = {0};

    for (int i = 0; i < gck_group_words(dtype); i++) {
        const uint32_t word = word_at(words, dtype, i);
        coded[i] = word & ((1u << width) - 1u);
        coded[gck_group_words(dtype) + i % columns] |= word >> width << (i / columns * spare);
    }
    for (int i = 0; i < GCK_GROUP; i++) {
        /* A corrupt payload may have more escapes than its arena; nothing beyond it is read. */
        const uint32_t escape = arena[used < GCK_ARENA ? used : GCK_ARENA - 1];
        used += coded[i] >> gck_low_bits(dtype) == GCK_ESCAPE_CODE;
        put_word(x, dtype, i, gck_uncoded(coded[i], base, escape, dtype));
    }
    return used;
}

static int encode_blocks(gck_dtype dtype, const char *x, int64_t ngroups, gck_lossless_parts to)
{
    const size_t stride = GCK_GROUP * (size_t)gck_word_bits(dtype) / 8;
    int status = GCK_OK;

    for (int64_t g = 0; g < ngroups; g += GCK_BLOCK_GROUPS, to.arenas += GCK_ARENA) {
        const int n = ngroups - g < GCK_BLOCK_GROUPS ? (int)(ngroups - g) : GCK_BLOCK_GROUPS;
        int used = 0;
        memset(to.arenas, 0, GCK_ARENA);
        for (int j = 0; j < n; j++, x += stride, to.words += gck_group_bytes(dtype)) {
            used = gck_lossless_encode_group(x, dtype, to.words, to.bases + g + j, to.arenas, used);
        }
        if (used > GCK_ARENA) {
            memset(to.bases + g, 0, (size_t)n);
            status = GCK_E_OVERFLOW;
        }
    }
    return status;
}

static void decode_blocks(gck_dtype dtype, gck_lossless_parts from, int64_t ngroups, char *x)
{
    const size_t stride = GCK_GROUP * (size_t)gck_word_bits(dtype) / 8;
    int used = 0;

    for (int64_t g = 0; g < ngroups; g++, x += stride, from.words += gck_group_bytes(dtype)) {
        used = g % GCK_BLOCK_GROUPS == 0 ? 0 : used;
        used = gck_lossless_decode_group(from.words, from.bases[g], from.arenas + g / GCK_BLOCK_GROUPS * GCK_ARENA,
                                         used, x, dtype);
    }
}

/* One pair per dtype, so that the dtype is a constant to the compiler. */
#define KERNELS(suffix, dtype)                                                                                      \
    int gck_portable_lossless_encode_##suffix(const void *x, int64_t ngroups, gck_lossless_parts to, int streaming) \
    {                                                                                                               \
        (void)streaming;                                                                                            \
        return encode_blocks(dtype, x, ngroups, to);                                                                \
    }                                                                                                               \
    void gck_portable_lossless_decode_##suffix(gck_lossless_parts from, int64_t ngroups, void *x, int streaming)    \
    {                                                                                                               \
        (void)streaming;                                                                                            \
        decode_blocks(dtype, from, ngroups, x);                                                                     \
    }
KERNELS(f32, GCK_F32)
KERNELS(f16, GCK_F16)
KERNELS(bf16, GCK_BF16)
