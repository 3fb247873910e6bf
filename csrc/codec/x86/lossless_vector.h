/* lossless_vector.h: lossless, for vectors of any width.
 *
 * A template: lossless_avx2.c and lossless_avx512.c define more v_ functions and ISA,
 * and include this file, which defines their kernels.  `dtype` is a constant
 * everywhere.  Groups whose base is not their largest exponent, or that have no finite one, go to
 * the reference.
 *
 * The exponents of bfloat16 and float32, once rotated, are bytes: arithmetic on bytes moves them
 * and leaves the low bits alone.  Those of float16 are extracted first. */

enum { ROW_VECTORS = 64 / sizeof(vec), F16_ROWS = sizeof(vec) / 16 };

/* Vectors of a group of values. */
INLINE int nvectors(gck_dtype dtype) { return GCK_GROUP * gck_word_bits(dtype) / 8 / (int)sizeof(vec); }

/* The same number in every word, from the lowest bit of the exponent on. */
INLINE vec exponents(uint32_t e, gck_dtype dtype)
{
    return dtype == GCK_F32 ? v_all32(e << 24) : v_all16(e << gck_low_bits(dtype));
}

INLINE vec lows(gck_dtype dtype) { return dtype == GCK_F32 ? v_all32(0x00FFFFFFu) : v_all16(gck_low_mask(dtype)); }

INLINE vec rotated(vec v, gck_dtype dtype)
{
    return v_or(v_add(v, v, dtype), v_shr(v, gck_word_bits(dtype) - 1, dtype));
}

INLINE vec unrotated(vec v, gck_dtype dtype)
{
    return v_or(v_shr(v, 1, dtype), v_shl(v, gck_word_bits(dtype) - 1, dtype));
}

/* The parameters with which one group is coded. */
typedef struct {
    vec origin;                        /* coding: base - 14; decoding: base - 15, modulo 2^w */
    vec one, low;
} window;

INLINE window window_from(uint32_t origin, gck_dtype dtype)
{
    return (window){exponents(origin, dtype), exponents(1, dtype), lows(dtype)};
}

INLINE window coding(uint32_t base, gck_dtype dtype) { return window_from(base - GCK_WINDOW, dtype); }
INLINE window decoding(uint32_t base, gck_dtype dtype) { return window_from(base - GCK_TOP_CODE, dtype); }

/* Rotated words, none above the base -> coded ones: the exponent less base - 14, and 1 unless it is
 * 0. */
INLINE vec coded(vec r, window w, gck_dtype dtype)
{
    if (dtype != GCK_F16) {                        /* faster: by bytes, whose lower ones are 0 */
        return v_add8(v_subs8(r, w.origin), v_min8(r, w.one));
    }
    const vec e = v_andnot(w.low, r);
    return v_or(v_and(r, w.low), v_add(v_subs16(e, w.origin), v_min(e, w.one, dtype), dtype));
}

/* The inverse, except for escapes. */
INLINE vec uncoded(vec c, window w, gck_dtype dtype)
{
    if (dtype != GCK_F16) {                        /* faster */
        return unrotated(v_add8_unless_zero(c, w.origin), dtype);
    }
    return unrotated(v_or(v_and(c, w.low), v_add16_unless_zero(v_andnot(w.low, c), w.origin)), dtype);
}

/* All ones in the exponent's place of escaped words; other places are ignored. */
INLINE vec escapes(vec c, window w, gck_dtype dtype)
{
    return dtype != GCK_F16 ? v_eq8(c, w.one) : v_eq16(v_andnot(w.low, c), w.one);
}

/* Bit 0 of the mask: the first byte.  One bit for each escaped word: its last byte. */
INLINE uint64_t escape_bits(vec escapes, gck_dtype dtype)
{
    return v_bytes(escapes) & (dtype == GCK_F32 ? 0x8888888888888888u : 0xAAAAAAAAAAAAAAAAu);
}

INLINE uint32_t word_at(const void *p, gck_dtype dtype, int i)
{
    return dtype == GCK_F32 ? ((const uint32_t *)p)[i] : ((const uint16_t *)p)[i];
}

/* ---- encode ---- */

/* The largest exponent of a group; and the least above 0, less 1: some large number when
 * all are 0. */
typedef struct {
    uint32_t top, least;
} range;

INLINE range range_of(const char *group, gck_dtype dtype)
{
    const vec one = exponents(1, dtype);
    vec top = v_all32(0), least = v_all32(~0u);

    for (int k = 0; k < nvectors(dtype); k++) {
        const vec v = v_load(group + k * (int)sizeof(vec));
        const vec twice = v_add(v, v, dtype);
        top = v_max(top, twice, dtype);
        least = v_min(least, v_sub(twice, one, dtype), dtype);
    }
    const int below = dtype == GCK_F16 ? 11 : 8;
    return (range){v_largest(top, dtype) >> below, v_smallest(least, dtype) >> below};
}

/* bfloat16 and float32: the last row's bits go into the others. */
INLINE void put_words(const char *group, gck_dtype dtype, window w, uint8_t *out, int stream)
{
    const int spare = gck_spare_bits(dtype), width = gck_word_bits(dtype) - spare, rows = gck_rows(dtype);
    const vec above = dtype == GCK_F32 ? v_all32(0xF0000000u) : v_all16(0xF000u);

    for (int k = 0; k < ROW_VECTORS; k++) {
        const int at = k * (int)sizeof(vec);
        const vec last = coded(rotated(v_load(group + 64 * (rows - 1) + at), dtype), w, dtype);
        for (int r = 0; r < rows - 1; r++) {
            const vec c = coded(rotated(v_load(group + 64 * r + at), dtype), w, dtype);
            const vec piece = v_and(v_shl(last, width - r * spare, dtype), above);
            v_store(out + 64 * r + at, v_or(c, piece), stream);
        }
    }
}

/* float16: a vector holds several rows, each in 16 bytes. */
INLINE void put_words_f16(const char *group, window w, uint8_t *out, int stream)
{
    const vec top = v_all16(0x8000u);
    vec c[8 * 32 / sizeof(vec)];

    for (int k = 0; k < nvectors(GCK_F16); k++) {
        c[k] = coded(rotated(v_load(group + k * (int)sizeof(vec)), GCK_F16), w, GCK_F16);
    }
    const vec last = v_spread(c[nvectors(GCK_F16) - 1]);
    for (int k = 0; k < nvectors(GCK_F16); k++) {
        const vec bit = v_and(v_shl(last, 16 - F16_ROWS * (k + 1), GCK_F16), top);
        const int rows = k < nvectors(GCK_F16) - 1 ? F16_ROWS : F16_ROWS - 1;
        v_store_rows(out + k * (int)sizeof(vec), v_or(c[k], bit), rows, stream);
    }
}

/* Write the exponents of a group's escaped values into the arena, if they are at most two.  Returns
 * how many, or -1. */
static __attribute__((noinline)) int list_escapes(const char *group, gck_dtype dtype, uint32_t base, uint8_t *arena,
                                                  int used)
{
    const window w = coding(base, dtype);
    int n = 0, at[2];

    for (int k = 0; k < nvectors(dtype); k++) {
        const vec c = coded(rotated(v_load(group + k * (int)sizeof(vec)), dtype), w, dtype);
        for (uint64_t bits = escape_bits(escapes(c, w, dtype), dtype); bits != 0; bits &= bits - 1) {
            if (n == 2) {
                return -1;
            }
            at[n++] = (k * (int)sizeof(vec) + __builtin_ctzll(bits)) * 8 / gck_word_bits(dtype);
        }
    }
    for (int i = 0; i < n; i++) {
        if (used + i < GCK_ARENA) {
            arena[used + i] = (uint8_t)(gck_rotated(word_at(group, dtype, at[i]), dtype) >> gck_low_bits(dtype));
        }
    }
    return n;
}

INLINE int encode_blocks(gck_dtype dtype, const char *x, int64_t ngroups, gck_lossless_parts to, int stream)
{
    const size_t stride = GCK_GROUP * (size_t)gck_word_bits(dtype) / 8;
    int status = GCK_OK, used = 0;
    range next = ngroups > 0 ? range_of(x, dtype) : (range){0, 0};

    for (int64_t g = 0; g < ngroups; g++, x += stride, to.words += gck_group_bytes(dtype)) {
        const range now = next;
        const uint32_t base = gck_base_of(now.top);
        int listed = 0;

        /* One group ahead, so that no instruction waits for its base. */
        next = range_of(x + (g + 1 < ngroups ? stride : 0), dtype);
        prefetch(x, stride, NEXT_PAGE);
        if (g % GCK_BLOCK_GROUPS == 0) {
            memset(to.arenas + g / GCK_BLOCK_GROUPS * GCK_ARENA, 0, GCK_ARENA);
            used = 0;
        }
        uint8_t *arena = to.arenas + g / GCK_BLOCK_GROUPS * GCK_ARENA;
        if (now.top != gck_special(dtype) && now.least + GCK_WINDOW < base) {
            listed = list_escapes(x, dtype, base, arena, used);
        }
        if (now.top == gck_special(dtype) || listed < 0) {
            used = gck_lossless_encode_group(x, dtype, to.words, to.bases + g, arena, used);
        } else {
            used += listed;
            to.bases[g] = (uint8_t)base;
            if (dtype == GCK_F16) {
                put_words_f16(x, coding(base, dtype), to.words, stream);
            } else {
                put_words(x, dtype, coding(base, dtype), to.words, stream);
            }
        }
        if (used > GCK_ARENA && (g % GCK_BLOCK_GROUPS == GCK_BLOCK_GROUPS - 1 || g == ngroups - 1)) {
            const int64_t first = g / GCK_BLOCK_GROUPS * GCK_BLOCK_GROUPS;
            memset(to.bases + first, 0, (size_t)(g + 1 - first));
            status = GCK_E_OVERFLOW;
        }
    }
    return status;
}

/* ---- decode ---- */

enum { MOST_VECTORS = 512 / sizeof(vec) };

/* The coded words of a group, in the order of the values. */
INLINE void take_words(const uint8_t *words, gck_dtype dtype, vec *c)
{
    const int spare = gck_spare_bits(dtype), width = gck_word_bits(dtype) - spare, rows = gck_rows(dtype);
    const vec field = dtype == GCK_F32 ? v_all32(0x0FFFFFFFu) : v_all16(0x0FFFu);

    for (int k = 0; k < ROW_VECTORS; k++) {
        vec last = v_all32(0);
        for (int r = 0; r < rows - 1; r++) {
            const vec word = v_load(words + 64 * r + k * (int)sizeof(vec));
            c[r * ROW_VECTORS + k] = v_and(word, field);
            last = v_or(last, v_shl(v_shr(word, width, dtype), r * spare, dtype));
        }
        c[(rows - 1) * ROW_VECTORS + k] = last;
    }
}

INLINE void take_words_f16(const uint8_t *words, vec *c)
{
    const int n = nvectors(GCK_F16);
    const vec field = v_all16(0x7FFFu);
    vec last = v_all32(0);

    for (int k = 0; k < n; k++) {
        const vec word = k < n - 1 ? v_load(words + k * (int)sizeof(vec))
                                   : v_load_but_a_row(words + k * (int)sizeof(vec));
        c[k] = v_and(word, field);
        last = v_or(last, v_shl(v_shr(word, 15, GCK_F16), F16_ROWS * k, GCK_F16));
    }
    c[n - 1] = v_with_last_row(c[n - 1], last);
}

/* Put the exponents of the arena into the values of a group.  Returns how many are used up then. */
static __attribute__((noinline)) int put_escapes(const vec *c, gck_dtype dtype, window w,
                                                 const uint8_t *arena, int used, void *values)
{
    for (int k = 0; k < nvectors(dtype); k++) {
        for (uint64_t bits = escape_bits(escapes(c[k], w, dtype), dtype); bits != 0; bits &= bits - 1) {
            const int i = (k * (int)sizeof(vec) + __builtin_ctzll(bits)) * 8 / gck_word_bits(dtype);
            const uint32_t exponent = arena[used < GCK_ARENA ? used : GCK_ARENA - 1];
            const uint32_t low = gck_rotated(word_at(values, dtype, i), dtype) & gck_low_mask(dtype);
            const uint32_t bits_of = gck_unrotated((exponent << gck_low_bits(dtype) | low) & gck_word_mask(dtype),
                                                   dtype);
            if (dtype == GCK_F32) {
                ((uint32_t *)values)[i] = bits_of;
            } else {
                ((uint16_t *)values)[i] = (uint16_t)bits_of;
            }
            used++;
        }
    }
    return used;
}

INLINE void decode_blocks(gck_dtype dtype, gck_lossless_parts from, int64_t ngroups, char *x, int stream)
{
    const int n = nvectors(dtype);
    vec c[MOST_VECTORS];
    _Alignas(64) char buffer[512];
    int used = 0;

    for (int64_t g = 0; g < ngroups; g++, x += n * (int)sizeof(vec), from.words += gck_group_bytes(dtype)) {
        const window w = decoding(from.bases[g], dtype);
        const uint8_t *arena = from.arenas + g / GCK_BLOCK_GROUPS * GCK_ARENA;
        vec any = v_all32(0);

        used = g % GCK_BLOCK_GROUPS == 0 ? 0 : used;
        if (from.bases[g] < GCK_WINDOW) {
            used = gck_lossless_decode_group(from.words, from.bases[g], arena, used, x, dtype);
            continue;
        }
        if (dtype == GCK_F16) {
            take_words_f16(from.words, c);
        } else {
            take_words(from.words, dtype, c);
        }
        for (int k = 0; k < n; k++) {
            any = v_or(any, escapes(c[k], w, dtype));
        }
        if (escape_bits(any, dtype) == 0) {
            for (int k = 0; k < n; k++) {
                v_store(x + k * (int)sizeof(vec), uncoded(c[k], w, dtype), stream);
            }
            continue;
        }
        for (int k = 0; k < n; k++) {
            v_store(buffer + k * (int)sizeof(vec), uncoded(c[k], w, dtype), 0);
        }
        used = put_escapes(c, dtype, w, arena, used, buffer);
        for (int k = 0; k < n; k++) {
            v_store(x + k * (int)sizeof(vec), v_load(buffer + k * (int)sizeof(vec)), stream);
        }
    }
}

#define KERNELS(suffix, dtype)                                                                                        \
    int KERNEL(ISA, lossless_encode_##suffix)(const void *x, int64_t ngroups, gck_lossless_parts to, int streaming)   \
    {                                                                                                                 \
        int status;                                                                                                   \
        STREAMED(status = encode_blocks, to.words, dtype, x, ngroups, to)                                             \
        return status;                                                                                                \
    }                                                                                                                 \
    void KERNEL(ISA, lossless_decode_##suffix)(gck_lossless_parts from, int64_t ngroups, void *x, int streaming)      \
    {                                                                                                                 \
        STREAMED(decode_blocks, x, dtype, from, ngroups, x)                                                           \
    }
KERNELS(f32, GCK_F32)
KERNELS(f16, GCK_F16)
KERNELS(bf16, GCK_BF16)
