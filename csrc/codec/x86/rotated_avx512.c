/* rotated_avx512.c: int8, int6 and int4 on AVX-512. */
#if defined(__x86_64__)
#include "codec/x86/doubt_avx512.h"
#include "codec/x86/rotate_avx512.h"
#include "codec/x86/rounding_avx512.h"

/* ---- encode ---- */

/* A group that is rotated, but whose scale is not yet known. */
typedef struct {
    __m512   y[8];
    uint32_t amax;                                 /* of y, float32 bits; ~0: no ordinary group */
    uint32_t at, outlier, least;                   /* int4: see gck_encode_rotated()            */
    uint32_t raw;                                  /* the largest |x|, in the bits of its dtype */
    int      doubtful;
    __m512i  noise[4];                             /* of the group, if it is dithered           */
} rotated;

/* 1 when amax is finite, and not tiny. */
INLINE int ordinary_rotated(uint32_t amax)
{
    const uint32_t low = gck_bits(GCK_TINY);

    return amax - low < 0x7F800000u - low;
}

/* The first value whose bits without the sign are `raw`, the largest of the group. */
INLINE uint32_t first_equal(const constants *c, gck_dtype dtype, const void *x, uint32_t raw)
{
    uint64_t equal[2] = {0, 0};

    if (dtype == GCK_F32) {
        for (int j = 0; j < 8; j++) {
            const __m512i bits = _mm512_and_si512(_mm512_loadu_si512((const char *)x + 64 * j), c->abs);
            equal[j / 4] |= (uint64_t)_mm512_cmpeq_epi32_mask(bits, all32(raw)) << (16 * (j % 4));
        }
    } else {
        for (int k = 0; k < 4; k++) {
            const __m512i words = _mm512_and_si512(_mm512_loadu_si512((const char *)x + 64 * k), c->abs);
            equal[k / 2] |= (uint64_t)_mm512_cmpeq_epi16_mask(words, all16(raw)) << (32 * (k % 2));
        }
    }
    return (uint32_t)(equal[0] ? __builtin_ctzll(equal[0]) : 64 + __builtin_ctzll(equal[1]));
}

INLINE void rotate_without_outlier(const constants *c, gck_dtype dtype, const void *x, const uint32_t *signs,
                                   int noisy, rotated *r)
{
    const uint32_t largest = bits_of_raw(r->raw, dtype);

    r->at = first_equal(c, dtype, x, r->raw);
    const uint64_t place = (uint64_t)1 << (r->at & 63u);
    const uint64_t kept[2] = {r->at < 64 ? ~place : ~(uint64_t)0, r->at < 64 ? ~(uint64_t)0 : ~place};
    rotate(c, dtype, x, kept, signs, r->y);
    r->amax = largest > gck_limit(dtype) || largest < gck_bits(GCK_TINY) ? ~0u : rotated_max_bits(r->y);
    uint16_t bits = 0;
    if (noisy) {
        memcpy(&bits, (const char *)r->noise + 2 * r->at, sizeof bits);
    }
    r->outlier = dtype == GCK_BF16 ? ((const uint16_t *)x)[r->at]
                                   : gck_int4_outlier(gck_load(x, dtype, r->at), noisy ? bits : GCK_NEAREST);
    r->least = gck_int4_low(r->outlier) << 3;
}

/* Group `index` of its tensor, number i of its tile. */
INLINE void rotate_group(const constants *c, gck_format format, gck_dtype dtype, const void *x, int64_t index,
                         const tile_signs *t, int i, const philox *p, rotated *r)
{
    const uint32_t *signs = gck_sign_words[gck_pattern(index)];

    if (p->dither != NULL) {
        noise_of_group(p, index, r->noise);
    }

    r->raw = t->raw[i];
    if (format == GCK_INT4) {
        rotate_without_outlier(c, dtype, x, signs, p->dither != NULL, r);
    } else {
        rotate(c, dtype, x, NULL, signs, r->y);
        r->amax = rotated_max_bits(r->y);
    }
    r->doubtful = is_doubtful(dtype, x, t, i, r->amax);
}

/* How many of 64 codes have different upper two bits. */
INLINE int count_large(__m512i t)
{
    const __m512i differ = _mm512_xor_si512(t, _mm512_slli_epi16(t, 1));   /* bit 7 of each byte */

    return __builtin_popcountll(_mm512_movepi8_mask(differ));
}

/* The codes of an int8 or int6 group and its side word. */
INLINE void pack_group(const constants *c, gck_format format, __m512i t0, __m512i t1, uint32_t stored, uint8_t *codes,
                      uint16_t *side, int stream)
{
    const int uniform = format == GCK_INT6 && count_large(t0) + count_large(t1) > GCK_MANY_LARGE;

    if (format == GCK_INT8) {
        put(codes, t0, stream);
        put(codes + 64, t1, stream);
    } else if (uniform) {
        pack_int6(c, t0, t1, 1, codes, stream);
    } else {
        pack_int6(c, t0, t1, 0, codes, stream);
    }
    side[0] = (uint16_t)(stored | (uint32_t)uniform);
}

/* Write the codes of a group with stochastic rounding, and the side word of int8 and int6. */
INLINE void pack_noisy_group(const constants *c, gck_format format, gck_dtype dtype, const rotated *r, uint32_t stored,
                            __m512 inverse, uint8_t *codes, uint16_t *side)
{
    __m512 p[8];
    __m512i a, b;

    for (int j = 0; j < 8; j++) {
        p[j] = _mm512_mul_ps(r->y[j], inverse);
    }
    if (format == GCK_INT8) {
        a = quantise_noisy(c, dtype, p, r->noise);
        b = quantise_noisy(c, dtype, p + 4, r->noise + 2);
        put(codes, a, 0);
        put(codes + 64, b, 0);
        side[0] = (uint16_t)stored;
        return;
    }
    if (format == GCK_INT4) {
        a = level_bytes_noisy(c, format, dtype, 0, p, r->noise);
        b = level_bytes_noisy(c, format, dtype, 0, p + 4, r->noise + 2);
        put(codes, packed_nibbles(c, raised(c, a), raised(c, b)), 0);
        return;
    }
    const int uniform = count_large_noisy(p) > GCK_MANY_LARGE;
    if (uniform) {
        a = level_bytes_noisy(c, format, dtype, 1, p, r->noise);
        b = level_bytes_noisy(c, format, dtype, 1, p + 4, r->noise + 2);
    } else {
        a = level_bytes_noisy(c, format, dtype, 0, p, r->noise);
        b = level_bytes_noisy(c, format, dtype, 0, p + 4, r->noise + 2);
    }
    put_int6(c, a, b, codes, 0);
    side[0] = (uint16_t)(stored | (uint32_t)uniform);
}

/* The same, to nearest. */
INLINE void pack_nearest_group(const constants *c, gck_format format, gck_dtype dtype, const rotated *r,
                               uint32_t stored, __m512 inverse, uint8_t *codes, uint16_t *side, int stream)
{
    const __m512i t0 = quantise(c, dtype, r->y, inverse), t1 = quantise(c, dtype, r->y + 4, inverse);

    if (format == GCK_INT4) {
        pack_int4(c, t0, t1, codes, stream);
        return;
    }
    pack_group(c, format, t0, t1, stored, codes, side, stream);
}

INLINE void encode_group(const constants *c, gck_format format, gck_dtype dtype, const void *x, const rotated *r,
                         int64_t index, const gck_dither *dither, encode_unusual *unusual, uint8_t *codes,
                         uint16_t *side, int stream)
{
    const uint32_t stored = gck_stored(format, 0, dither != NULL, gck_float(r->amax));
    const int ordinary = format == GCK_INT4 ? r->amax - 1u < ~0u - 1u && stored >= r->least : ordinary_rotated(r->amax);

    if ((!ordinary || r->doubtful)
        && unusual(x, ordinary ? gck_float(r->amax) : 0.f, index, dither, codes, side)) {
        return;
    }
    const __m512 inverse = _mm512_set1_ps(gck_inverse(format, 0, stored));
    if (dither != NULL) {
        pack_noisy_group(c, format, dtype, r, stored, inverse, codes, side);
    } else {
        pack_nearest_group(c, format, dtype, r, stored, inverse, codes, side, stream);
    }
    if (format == GCK_INT4) {
        side[0] = (uint16_t)(r->at << 9 | (((stored - r->least) >> 3) + 1u));
        side[1] = (uint16_t)r->outlier;
    }
}

/* Two groups at a time: the second is rotated while the scale of the first, a long chain of scalar
 * operations, is being computed. */
INLINE void encode_groups(gck_format format, gck_dtype dtype, const void *x, int64_t ngroups,
                          uint8_t *codes, uint16_t *side, int64_t index, const gck_dither *dither,
                          encode_unusual *unusual, int stream)
{
    const constants c = make_constants(format, dtype);
    const size_t stride = group_nbytes(dtype), ncodes = gck_code_bytes(format), words = gck_side_words(format);
    const philox p = philox_of(dither);
    const char *at = x;
    tile_signs t = {.doubtful = 0};
    rotated a, b;
    int64_t g = 0;

    for (; g + 2 <= ngroups; g += 2, at += 2 * stride, codes += 2 * ncodes, side += 2 * words) {
        const int i = (int)(g % TILE);
        if (i == 0) {
            signs_of_tile(dtype, at, ngroups - g < TILE ? (int)(ngroups - g) : TILE, &t);
        }
        rotate_group(&c, format, dtype, at, index + g, &t, i, &p, &a);
        rotate_group(&c, format, dtype, at + stride, index + g + 1, &t, i + 1, &p, &b);
        encode_group(&c, format, dtype, at, &a, index + g, dither, unusual, codes, side, stream);
        encode_group(&c, format, dtype, at + stride, &b, index + g + 1, dither, unusual, codes + ncodes, side + words,
                     stream);
    }
    if (g < ngroups) {
        if (g % TILE == 0) {
            signs_of_tile(dtype, at, 1, &t);
        }
        rotate_group(&c, format, dtype, at, index + g, &t, (int)(g % TILE), &p, &a);
        encode_group(&c, format, dtype, at, &a, index + g, dither, unusual, codes, side, stream);
    }
}

/* ---- decode ---- */

/* 128 halves: 64 at value 0. */
TABLE uint32_t level_halves[16] = {64};

/* H code: int8 from its bytes, the others from their levels. */
INLINE void sums_of_group(const constants *c, gck_format format, const uint8_t *codes, int uniform, __m512i y[8])
{
    __m512i value[2];

    if (format == GCK_INT8) {
        int8_values(codes, value);
    } else if (format == GCK_INT4) {
        int4_values(c, codes, value);
    } else if (uniform) {
        int6_values(c, codes, 1, value);
    } else {
        int6_values(c, codes, 0, value);
    }
    unrotate(c, value, y);
    if (format != GCK_INT8) {
        y[0] = _mm512_add_epi32(y[0], _mm512_loadu_si512(level_halves));
    }
}

TABLE uint32_t first_of_pair[16] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
TABLE uint32_t last_of_pair[16] = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

/* Signs last: a zero y under a negative sign is -0.  int4: value `at` is `outlier`, bfloat16. */
INLINE void decode_group(const constants *c, gck_format format, gck_dtype dtype, const uint8_t *codes, uint32_t stored,
                         const uint16_t *side, int64_t index, void *x, int stream)
{
    const __m512 step = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_set1_epi32((int)(stored << 16))), c->step);
    const __m512i outlier = format == GCK_INT4 ? all16(side[1]) : c->ones;
    const __m512 wide = _mm512_castsi512_ps(_mm512_and_si512(outlier, c->upper));
    const uint32_t at = side[0] >> 9;
    const uint32_t *signs = gck_sign_words[gck_pattern(index)];
    __m512i y[8];

    sums_of_group(c, format, codes, side[0] & 1, y);
    for (int k = 0; k < 4; k++) {
        const __m512 even = _mm512_mul_ps(_mm512_cvtepi32_ps(y[2 * k]), step);
        const __m512 odd = _mm512_mul_ps(_mm512_cvtepi32_ps(y[2 * k + 1]), step);
        const uint32_t here = format == GCK_INT4 && at / 32 == (uint32_t)k ? 1u << at % 32 : 0;
        if (dtype == GCK_BF16) {
            const __m512i w = _mm512_xor_si512(to_bf16(c, even, odd), negated_words(signs[k]));
            put((char *)x + 64 * k, format == GCK_INT4 ? _mm512_mask_blend_epi16(here, w, outlier) : w, stream);
        } else {
            const __m512i first = _mm512_loadu_si512(first_of_pair), last = _mm512_loadu_si512(last_of_pair);
            __m512 lo = flip_natural(_mm512_permutex2var_ps(even, first, odd), signs, 2 * k);
            __m512 hi = flip_natural(_mm512_permutex2var_ps(even, last, odd), signs, 2 * k + 1);
            if (format == GCK_INT4) {
                lo = _mm512_mask_blend_ps((__mmask16)here, lo, wide);
                hi = _mm512_mask_blend_ps((__mmask16)(here >> 16), hi, wide);
            }
            put_pair(c, x, dtype, k, lo, hi, stream);
        }
    }
}

/* The step of an ordinary group as stored, else ~0.  For int8, any step that is a number, because
 * it is rounded as in the reference.  The steps of levels, which the reference halves, are exact
 * from biased exponent 34 on. */
INLINE uint32_t ordinary_step(gck_format format, const uint16_t *side)
{
    const uint32_t low = format == GCK_INT8 ? 0u : 34u << 7;
    uint32_t stored = side[0];

    if (format == GCK_INT6) {
        stored &= ~1u;
    } else if (format == GCK_INT4) {
        stored = (side[1] & GCK_INT4_UNUSUAL) == GCK_INT4_UNUSUAL ? ~0u : gck_int4_stored(stored & 511u, side[1]);
    }
    return stored == 0 || stored - low < (255u << 7) - low ? stored : ~0u;
}

INLINE void decode_groups(gck_format format, gck_dtype dtype, const uint8_t *codes, const uint16_t *side,
                          int64_t ngroups, void *x, int64_t index, decode_unusual *unusual, int stream)
{
    const constants c = make_constants(format, dtype);
    char *at = x;

    for (int64_t g = 0; g < ngroups; g++) {
        const uint32_t stored = ordinary_step(format, side);

        if (stored != ~0u) {
            decode_group(&c, format, dtype, codes, stored, side, index + g, at, stream);
        } else {
            unusual(codes, side, index + g, at);
        }
        codes += gck_code_bytes(format);
        side += gck_side_words(format);
        at += group_nbytes(dtype);
    }
}

X86_DTYPES(avx512, GCK_INT8, encode_groups, decode_groups)
X86_DTYPES(avx512, GCK_INT6, encode_groups, decode_groups)
X86_DTYPES(avx512, GCK_INT4, encode_groups, decode_groups)

#else
typedef int gck_rotated_avx512_is_empty;       /* ISO C requires a declaration in every file */
#endif
