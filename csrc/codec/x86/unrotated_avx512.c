/* unrotated_avx512.c: fp8_e4m3, fp8_e5m2 and int8_plain on AVX-512. */
#if defined(__x86_64__)
#include "codec/x86/fp8_tables.h"
#include "codec/x86/rounding_avx512.h"

/* ---- encode: fp8 ---- */

/* gck_fp8_code() of |lo|, |hi|: 32 words of 7 bits, in pair order.
 * Rounding has two parts: subtract 1 when the last kept bit is even, so that a tie falls below the
 * half; then round half up.  The second part works on the upper halves alone, as one mulhrs:
 * (w * 2^(15 - n) + 2^14) >> 15 = (w + half) >> n, with n bits still to drop.
 * Zero becomes -1 in between and 0 again; it cannot borrow from a sign, which is absent here. */
INLINE __m512i fp8_words(const constants *c, __m512 lo, __m512 hi, __m512 m)
{
    __m512i a = _mm512_castps_si512(_mm512_mul_ps(lo, m));
    __m512i b = _mm512_castps_si512(_mm512_mul_ps(hi, m));

    a = _mm512_mask_add_epi32(a, _mm512_testn_epi32_mask(a, c->fp8_last), a, c->ones);
    b = _mm512_mask_add_epi32(b, _mm512_testn_epi32_mask(b, c->fp8_last), b, c->ones);
    return _mm512_mulhrs_epi16(merge_upper(c, a, b), c->fp8_round);
}

/* The same, with stochastic rounding: the last place of a code is bit 16 + shift. */
INLINE __m512i noisy_product(gck_format format, __m512 x, __m512 m, __m512i noise)
{
    const unsigned shift = format == GCK_E4M3 ? 4 : 5;
    const __m512i up = _mm512_or_si512(_mm512_slli_epi32(noise, shift), all32(1u << (shift - 1)));

    return _mm512_add_epi32(_mm512_castps_si512(_mm512_mul_ps(x, m)), up);
}

INLINE __m512i noisy_words(const constants *c, gck_format format, gck_dtype dtype, __m512 lo, __m512 hi, __m512 m,
                           __m512i noise)
{
    __m512i u, v;

    noise_of_pair(c, dtype, noise, &u, &v);
    const __m512i w = merge_upper(c, noisy_product(format, lo, m, u), noisy_product(format, hi, m, v));
    return format == GCK_E4M3 ? _mm512_min_epu16(_mm512_srli_epi16(w, 4), all16(0x7E))
                              : _mm512_min_epu16(_mm512_srli_epi16(w, 5), all16(0x7B));
}

/* Pair k of x: codes without signs; *signs: words whose top bits are the signs.  noise: of the
 * group, or NULL. */
INLINE __m512i encode_pair(const constants *c, gck_format format, gck_dtype dtype, const void *x, int k, __m512 m,
                           const __m512i *noise, __m512i *signs)
{
    __m512 lo, hi;

    if (dtype == GCK_BF16) {
        *signs = _mm512_loadu_si512((const char *)x + 64 * k);
        split_bf16(c, _mm512_and_si512(*signs, c->abs), &lo, &hi);
    } else {
        load_pair(c, x, dtype, k, &lo, &hi);
        *signs = merge_upper(c, _mm512_castps_si512(lo), _mm512_castps_si512(hi));
        lo = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(lo), c->abs32));
        hi = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(hi), c->abs32));
    }
    return noise != NULL ? noisy_words(c, format, dtype, lo, hi, m, noise[k]) : fp8_words(c, lo, hi, m);
}

/* 64 values: half h of an ordinary group.  Saturation to a byte keeps the sign. */
INLINE __m512i encode_half(const constants *c, gck_format format, gck_dtype dtype, const void *x, int h, __m512 m,
                           const __m512i *noise)
{
    __m512i s0, s1;
    const __m512i w0 = encode_pair(c, format, dtype, x, 2 * h, m, noise, &s0);
    const __m512i w1 = encode_pair(c, format, dtype, x, 2 * h + 1, m, noise, &s1);
    const __m512i signs = _mm512_packs_epi16(s0, s1), codes = _mm512_packus_epi16(w0, w1);

    return natural_bytes(blend_one(signs, c->sign_bytes, codes), dtype);
}

/* fp8_e4m3 of bfloat16 by fp8_tables.h: (word + byte) >> 4 is the code, except for the sum of the
 * two exponents.  Zeros lie below that and become 0.  Returns 0 for a group that has to be encoded
 * again, because some code may be a subnormal. */
INLINE int encode_e4m3_bf16(const constants *c, const void *x, uint32_t stored, float multiplier, uint8_t *codes,
                            int stream)
{
    const uint64_t *row = gck_e4m3_offsets[stored & 0x7Fu];
    const __m512i offsets = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)row));
    const uint32_t exponent = gck_bits(multiplier) >> 23;
    /* The upper bytes of the lanes get an offset too: the first. */
    const __m512i base = all16(((127u - exponent) << 7) + ((uint32_t)row[0] << 8 & 0xFF00u));
    __m512i least = c->ones;

    for (int h = 0; h < 2; h++) {
        __m512i word[2], abs[2];
        for (int i = 0; i < 2; i++) {
            word[i] = _mm512_loadu_si512((const char *)x + 128 * h + 64 * i);
            const __m512i cell = _mm512_and_si512(_mm512_srli_epi16(word[i], 3), all16(15));
            const __m512i sum = _mm512_add_epi16(_mm512_and_si512(word[i], c->abs), _mm512_shuffle_epi8(offsets, cell));
            abs[i] = _mm512_srli_epi16(_mm512_subs_epu16(sum, base), 4);
        }
        const __m512i bytes = _mm512_packus_epi16(abs[0], abs[1]), signs = _mm512_packs_epi16(word[0], word[1]);
        least = _mm512_min_epu8(least, bytes);
        put(codes + 64 * h, natural_bytes(blend_one(signs, c->sign_bytes, bytes), GCK_BF16), stream);
    }
    /* The least normal code is 8.  Many groups have zeros below it; few have anything else
     * there. */
    return _mm512_cmpgt_epi8_mask(all32(0x08080808u), least) == 0 || !any_subnormal(x, (128u - exponent) << 7);
}

/* ---- encode ---- */

/* noise: of the group; NULL rounds to nearest. */
INLINE void encode_integers(const constants *c, gck_dtype dtype, const void *x, __m512 inverse, const __m512i *noise,
                            uint8_t *codes, int stream)
{
    __m512 y[8];

    for (int k = 0; k < 4; k++) {
        load_pair(c, x, dtype, k, &y[2 * k], &y[2 * k + 1]);
    }
    if (noise != NULL) {
        for (int j = 0; j < 8; j++) {
            y[j] = _mm512_mul_ps(y[j], inverse);
        }
        put(codes, quantise_noisy(c, dtype, y, noise), stream);
        put(codes + 64, quantise_noisy(c, dtype, y + 4, noise + 2), stream);
    } else {
        put(codes, quantise(c, dtype, y, inverse), stream);
        put(codes + 64, quantise(c, dtype, y + 4, inverse), stream);
    }
}

INLINE void encode_groups(gck_format format, gck_dtype dtype, const void *x, int64_t ngroups,
                          uint8_t *codes, uint16_t *scales, int64_t index, const gck_dither *dither,
                          encode_unusual *unusual, int stream)
{
    const constants c = make_constants(format, dtype);
    const philox p = philox_of(dither);
    tile t = {.ordinary = 0};
    __m512i noise[4];

    for (int64_t first = 0; first < ngroups; first += TILE) {
        const char *xt = (const char *)x + (size_t)first * group_nbytes(dtype);
        const int count = (int)(ngroups - first < TILE ? ngroups - first : TILE);

        for (int i = 0; i < count; i++) {
            t.amax[i] = abs_max_bits(&c, xt + (size_t)i * group_nbytes(dtype), dtype);
        }
        tile_scales(&t, format, dtype, dither != NULL);
        for (int i = 0; i < count; i++) {
            const char *xg = xt + (size_t)i * group_nbytes(dtype);
            uint8_t *cg = codes + (first + i) * GCK_GROUP;

            if (__builtin_expect(!(t.ordinary >> i & 1), 0)) {
                unusual(xg, 0.f, index + first + i, dither, cg, scales + first + i);
                continue;
            }
            const __m512 m = _mm512_set1_ps(t.multiplier[i]);
            scales[first + i] = (uint16_t)t.stored[i];
            if (format == GCK_E4M3 && dtype == GCK_BF16 && dither == NULL
                && __builtin_expect(encode_e4m3_bf16(&c, xg, t.stored[i], t.multiplier[i], cg, stream), 1)) {
                continue;
            }
            if (dither != NULL) {
                noise_of_group(&p, index + first + i, noise);
            }
            const __m512i *bits = dither != NULL ? noise : NULL;
            if (gck_is_fp8(format)) {
                put(cg, encode_half(&c, format, dtype, xg, 0, m, bits), stream);
                put(cg + 64, encode_half(&c, format, dtype, xg, 1, m, bits), stream);
            } else {
                encode_integers(&c, dtype, xg, m, bits, cg, stream);
            }
        }
    }
}

/* ---- decode: fp8 ---- */

/* A code of exponent e > 0 is a significand (8..15, E5M2: 4..7) x 2^(e + const); one of
 * e = 0 is a subnormal, 0..7 (0..3) x 2^const.  Both kinds x step, rounded to the dtype
 * as if e were 0, are a table of 16 (8); then e is added to the exponent.  Rounding a
 * normal number does not depend on its exponent, so that is exact as long as table and
 * result are normal: see ordinary_scale().  Here x 2^-32 (2^-40), the stored offset. */
#define SUBNORMAL(i) (i) * 0x1p-41f
#define NORMAL(i)    (i) * 0x1p-42f
TABLE float e4m3_values[16] = {SUBNORMAL(0), SUBNORMAL(1), SUBNORMAL(2), SUBNORMAL(3),
                               SUBNORMAL(4), SUBNORMAL(5), SUBNORMAL(6), SUBNORMAL(7),
                               NORMAL(8), NORMAL(9), NORMAL(10), NORMAL(11),
                               NORMAL(12), NORMAL(13), NORMAL(14), NORMAL(15)};
#undef SUBNORMAL
#undef NORMAL
TABLE float e5m2_values[16] = {0x0p0f, 1 * 0x1p-56f, 2 * 0x1p-56f, 3 * 0x1p-56f,
                               4 * 0x1p-57f, 5 * 0x1p-57f, 6 * 0x1p-57f, 7 * 0x1p-57f};

/* No escape, and in biased exponents of the stored scale.  fp8: the least table entry,
 * 2^-41 (2^-56) x stored, is normal from 42 (57) on; below 254 every value, 480 (2^16.9)
 * x stored x 2^-16 at an intermediate step of the reference, is finite.  int8_plain: the product is
 * taken once where the reference takes two; both are equal if the step is normal, from 33 on. */
INLINE int ordinary_scale(gck_format format, uint32_t scale)
{
    const uint32_t low = (format == GCK_E4M3 ? 48u : format == GCK_E5M2 ? 64u : 33u) << 7;
    const uint32_t end = (gck_is_fp8(format) ? 254u : 255u) << 7;

    return scale - low < end - low;
}

/* The row of the table that a code without sign selects is its mantissa if e = 0, else
 * 8 | mantissa: the smaller of the code and that.  (E5M2: 4 |.) */
INLINE __m512i decode_words(const constants *c, gck_format format, __m256i codes, __m512i values)
{
    const __m512i w = _mm512_cvtepi8_epi16(codes);               /* the sign fills the upper byte */
    const __m512i normal = and_or(w, c->fp8_row, c->fp8_normal);
    const __m512i row = _mm512_min_epu16(_mm512_and_si512(w, c->fp8_code), normal);
    const __m512i moved = format == GCK_E4M3 ? _mm512_slli_epi16(w, 4) : _mm512_slli_epi16(w, 5);

    return _mm512_add_epi16(_mm512_permutexvar_epi16(row, values), _mm512_and_si512(moved, c->fp8_rest));
}

INLINE __m512 decode_floats(const constants *c, gck_format format, const uint8_t *codes, __m512i values)
{
    const __m512i w = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes));
    const __m512i normal = and_or(w, c->fp8_row, c->fp8_normal);
    const __m512i row = _mm512_min_epu32(_mm512_and_si512(w, c->fp8_code), normal);
    const __m512i moved = format == GCK_E4M3 ? _mm512_slli_epi32(w, 20) : _mm512_slli_epi32(w, 21);

    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_permutexvar_epi32(row, values), _mm512_and_si512(moved, c->fp8_rest)));
}

INLINE void decode_fp8(const constants *c, gck_format format, gck_dtype dtype, const uint8_t *codes,
                       uint32_t scale, void *x, int stream)
{
    const __m512 step = _mm512_castsi512_ps(_mm512_set1_epi32((int)(scale << 16)));
    const __m512 products = _mm512_mul_ps(table_ps(format == GCK_E4M3 ? e4m3_values : e5m2_values), step);

    if (dtype == GCK_BF16) {
        /* Each word twice; every second one is kept. */
        const __m512i values = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(to_bf16(c, products, products)));
        for (int k = 0; k < 4; k++) {
            const __m256i quarter = _mm256_loadu_si256((const __m256i *)(codes + 32 * k));
            put((char *)x + 64 * k, decode_words(c, format, quarter, values), stream);
        }
        return;
    }
    for (int k = 0; k < 4; k++) {
        const __m512 lo = decode_floats(c, format, codes + 32 * k, _mm512_castps_si512(products));
        const __m512 hi = decode_floats(c, format, codes + 32 * k + 16, _mm512_castps_si512(products));
        put_pair(c, x, dtype, k, lo, hi, stream);
    }
}

/* ---- decode: int8_plain ---- */

/* Codes 32 k .. 32 k + 31 to bfloat16, without a conversion: a byte placed at bit 15 of 256.0 makes
 * 256 + (code ^ 0x80) = 384 + code.  (384 + code) * s - 384 * s by FMA is code * s: that has 15
 * bits, so it is exact, and +0 for code 0. */
INLINE __m512i integer_words(const constants *c, const uint8_t *codes, __m512 step, __m512 minus_384_steps)
{
    const __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    const __m512 lo = _mm512_castsi512_ps(and_xor(_mm512_slli_epi32(w, 15), c->field, c->bias));
    const __m512 hi = _mm512_castsi512_ps(and_xor(_mm512_srli_epi32(w, 1), c->field, c->bias));

    return to_bf16(c, _mm512_fmadd_ps(lo, step, minus_384_steps), _mm512_fmadd_ps(hi, step, minus_384_steps));
}

INLINE __m512 integer_floats(const uint8_t *codes, __m512 step)
{
    const __m512i q = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes));

    return _mm512_mul_ps(_mm512_cvtepi32_ps(q), step);
}

INLINE void decode_integers(const constants *c, gck_dtype dtype, const uint8_t *codes, uint32_t scale,
                            void *x, int stream)
{
    const __m512 stored = _mm512_castsi512_ps(_mm512_set1_epi32((int)(scale << 16)));
    const __m512 step = _mm512_mul_ps(stored, c->step);
    const __m512 minus_384_steps = _mm512_mul_ps(stored, c->minus_384_steps);

    for (int k = 0; k < 4; k++) {
        if (dtype == GCK_BF16) {
            put((char *)x + 64 * k, integer_words(c, codes + 32 * k, step, minus_384_steps), stream);
        } else {
            put_pair(c, x, dtype, k, integer_floats(codes + 32 * k, step),
                     integer_floats(codes + 32 * k + 16, step), stream);
        }
    }
}

/* ---- decode ---- */

INLINE void decode_groups(gck_format format, gck_dtype dtype, const uint8_t *codes, const uint16_t *scales,
                          int64_t ngroups, void *x, int64_t index, decode_unusual *unusual, int stream)
{
    const constants c = make_constants(format, dtype);

    for (int64_t g = 0; g < ngroups; g++) {
        char *xg = (char *)x + (size_t)g * group_nbytes(dtype);
        const int ordinary = ordinary_scale(format, scales[g]);

        if (__builtin_expect(!ordinary && !is_zero_group(format, codes + g * GCK_GROUP, scales[g]), 0)) {
            unusual(codes + g * GCK_GROUP, scales + g, index + g, xg);
        } else if (gck_is_fp8(format)) {
            decode_fp8(&c, format, dtype, codes + g * GCK_GROUP, scales[g], xg, stream);
        } else {
            decode_integers(&c, dtype, codes + g * GCK_GROUP, scales[g], xg, stream);
        }
    }
}

X86_DTYPES(avx512, GCK_E4M3, encode_groups, decode_groups)
X86_DTYPES(avx512, GCK_E5M2, encode_groups, decode_groups)
X86_DTYPES(avx512, GCK_INT8_PLAIN, encode_groups, decode_groups)

#else
typedef int gck_unrotated_avx512_is_empty;     /* ISO C requires a declaration in every file */
#endif
