/* unrotated_avx2.c: fp8_e4m3, fp8_e5m2 and int8_plain for AVX2. */
#if defined(__x86_64__)

#include "codec/x86/fp8_tables.h"
#include "codec/x86/rounding_avx2.h"

/* ---- encode: fp8 ---- */

typedef struct {
    load_constants load;
    __m256i        below;                /* 16-bit lanes: see truncated                  */
    __m256i        shift;                /* 16-bit lanes: the factor of mulhrs           */
    __m256i        code, sign;           /* 16-bit lanes: 7 bits; bytes: bit 7           */
    __m256i        cell;                 /* 16-bit lanes: 4 bits                         */
    __m256         rounder;              /* int8_plain                                   */
} encode_constants;

/* The last place of a code is bit 4 (E5M2: 5) of the upper half of the product. */
INLINE encode_constants encode_constants_of(gck_format format, gck_dtype dtype)
{
    const int e4m3 = format == GCK_E4M3;
    return (encode_constants){constants_of(dtype), kept(e4m3 ? 0x00170017u : 0x002F002Fu),
                              kept(e4m3 ? 0x08000800u : 0x04000400u), kept(0x007F007Fu), kept(0x80808080u),
                              kept(0x000F000Fu), kept_ps(ROUNDER)};
}

/* gck_fp8_code() of 16 values, in 16-bit lanes.  *product: the upper halves of the
 * products, for their signs.
 *
 * With h bits below the last place, rounding to nearest even is (product + 2^(h-1)) >> h, which is
 * what mulhrs computes.  The product is first reduced by one when it lies halfway above an even
 * code: when the last place and all bits below but the first are 0 (`below` has them).  Reducing
 * changes the result of no other product of this kind: those end in 0 below the half. */
INLINE __m256i rounded16(v16 v, __m256 m, encode_constants c, __m256i *product)
{
    const __m256i even = _mm256_castps_si256(_mm256_mul_ps(v.even, m));
    const __m256i odd = _mm256_castps_si256(_mm256_mul_ps(v.odd, m));
    const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA);
    const __m256i low = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
    const __m256i rest = _mm256_or_si256(low, _mm256_and_si256(high, c.below));
    const __m256i less = _mm256_cmpeq_epi16(rest, _mm256_setzero_si256());
    *product = high;
    return _mm256_and_si256(_mm256_mulhrs_epi16(_mm256_add_epi16(high, less), c.shift), c.code);
}

/* The same, with stochastic rounding. */
INLINE __m256i noisy16(gck_format format, v16 v, __m256 m, __m256i noise, encode_constants c, __m256i *product)
{
    const int shift = format == GCK_E4M3 ? 4 : 5;            /* the last place: bit 16 + shift */
    const __m256i half = _mm256_set1_epi32(1 << (shift - 1)), bits = _mm256_set1_epi32(0xFFFF << shift);
    const __m256i up_even = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi32(noise, shift), bits), half);
    const __m256i up_odd = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(noise, 16 - shift), bits), half);
    const __m256i even = _mm256_add_epi32(_mm256_castps_si256(_mm256_mul_ps(v.even, m)), up_even);
    const __m256i odd = _mm256_add_epi32(_mm256_castps_si256(_mm256_mul_ps(v.odd, m)), up_odd);
    const __m256i last = _mm256_set1_epi16(format == GCK_E4M3 ? 0x7E : 0x7B);
    *product = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA);
    return _mm256_min_epi16(_mm256_and_si256(_mm256_srli_epi16(*product, shift), c.code), last);
}

/* 32 codes as two packs leave them.  noise: of the first 16 values and the others; NULL rounds to nearest. */
INLINE __m256i fp8_bytes(gck_format format, v16 first, v16 second, __m256 m, const __m256i *noise, encode_constants c)
{
    __m256i a, b;
    const __m256i abs_a = noise ? noisy16(format, first, m, noise[0], c, &a) : rounded16(first, m, c, &a);
    const __m256i abs_b = noise ? noisy16(format, second, m, noise[1], c, &b) : rounded16(second, m, c, &b);

    return _mm256_or_si256(_mm256_packus_epi16(abs_a, abs_b), _mm256_and_si256(_mm256_packs_epi16(a, b), c.sign));
}

/* fp8_e4m3 of bfloat16 by fp8_tables.h: (word + byte) >> 4 is the code, except for the sum of the
 * two exponents.  Zeros lie below that and become 0.  Returns 0 for a group that has to be encoded
 * again, because some code may be a subnormal. */
INLINE int encode_e4m3_bf16(const char *group, uint32_t stored, float multiplier, uint8_t *out, encode_constants c,
                            int stream)
{
    const uint64_t *row = gck_e4m3_offsets[stored & 0x7Fu];
    const __m256i offsets = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)row));
    const uint32_t exponent = gck_bits(multiplier) >> 23;
    /* The upper bytes of the lanes get an offset too: the first. */
    const __m256i base = _mm256_set1_epi16((short)(((127u - exponent) << 7) + ((uint32_t)row[0] << 8 & 0xFF00u)));
    __m256i least = _mm256_set1_epi8(127);

    for (int k = 0; k < 4; k++) {
        __m256i word[2], abs[2];
        for (int i = 0; i < 2; i++) {
            word[i] = _mm256_loadu_si256((const __m256i *)group + 2 * k + i);
            const __m256i cell = _mm256_and_si256(_mm256_srli_epi16(word[i], 3), c.cell);
            const __m256i sum = _mm256_add_epi16(_mm256_and_si256(word[i], c.load.abs),
                                                 _mm256_shuffle_epi8(offsets, cell));
            abs[i] = _mm256_srli_epi16(_mm256_subs_epu16(sum, base), 4);
        }
        const __m256i bytes = _mm256_packus_epi16(abs[0], abs[1]);
        const __m256i sign = _mm256_and_si256(_mm256_packs_epi16(word[0], word[1]), c.sign);
        least = _mm256_min_epu8(least, bytes);
        store(out + 32 * k, _mm256_permute4x64_epi64(_mm256_or_si256(bytes, sign), 0xD8), stream);
    }
    /* The least normal code is 8.  Many groups have zeros below it; few have anything else
     * there. */
    return _mm256_movemask_epi8(_mm256_cmpgt_epi8(_mm256_set1_epi8(8), least)) == 0
        || !any_subnormal((const uint16_t *)group, (128u - exponent) << 7);
}

/* ---- encode ---- */

INLINE __m256i noisy_of(v16 v, __m256 inverse, __m256i noise)
{
    return rounded_noisy((v16){_mm256_mul_ps(v.even, inverse), _mm256_mul_ps(v.odd, inverse)}, noise);
}

/* The same as fp8_bytes(), of int8_plain. */
INLINE __m256i integer_bytes(v16 a, v16 b, __m256 inverse, const __m256i *noise, __m256 rounder)
{
    return noise ? noisy_bytes(noisy_of(a, inverse, noise[0]), noisy_of(b, inverse, noise[1]))
                 : _mm256_packs_epi16(quantised(a, inverse, rounder), quantised(b, inverse, rounder));
}

/* noise: NULL rounds to nearest. */
INLINE void encode_group(gck_format format, gck_dtype dtype, const char *group, float multiplier, const __m256i *noise,
                         uint8_t *out, encode_constants c, int stream)
{
    const __m256i no_flip = _mm256_setzero_si256();
    const __m256 m = _mm256_set1_ps(multiplier);

    for (int k = 0; k < 8; k += 2) {
        const v16 a = load16(group, dtype, k, no_flip, c.load), b = load16(group, dtype, k + 1, no_flip, c.load);
        const __m256i *here = noise ? noise + k : NULL;
        const __m256i packed = gck_is_fp8(format) ? fp8_bytes(format, a, b, m, here, c)
                                                  : integer_bytes(a, b, m, here, c.rounder);
        store(out + 16 * k, _mm256_permute4x64_epi64(packed, 0xD8), stream);
    }
}

INLINE void encode(gck_format format, gck_dtype dtype, const void *x, int64_t ngroups, uint8_t *codes,
                   uint16_t *scales, int64_t index, const gck_dither *dither, encode_unusual *unusual, int stream)
{
    const uint32_t limit = gck_limit(dtype), large = 0x45FFFFFFu;   /* the last below GCK_LARGE */
    const uint32_t top = gck_is_fp8(format) && large < limit ? large : limit;
    const size_t stride = group_nbytes(dtype);
    const encode_constants c = encode_constants_of(format, dtype);
    const int noisy = dither != NULL;
    const philox p = philox_of(dither);
    __m256i noise[8];
    batch_steps next = steps_of_groups(format, dtype, noisy, x, ngroups, top, c.load);

    for (int64_t first = 0, after; first < ngroups; first = after) {
        const int n = ngroups - first < BATCH ? (int)(ngroups - first) : BATCH;
        const char *group = (const char *)x + (size_t)first * stride;
        const batch_steps s = next;

        /* One batch ahead, so that no instruction waits for the division. */
        after = batch_after(first, ngroups, dtype, stream);
        if (after < ngroups) {
            next = steps_of_groups(format, dtype, noisy, (const char *)x + (size_t)after * stride, ngroups - after,
                                   top, c.load);
        }
        for (int j = 0; j < n; j++, group += stride) {
            uint8_t *out = codes + (first + j) * GCK_GROUP;
            prefetch(group, stride, ahead_of(stride, stream));
            if (__builtin_expect(s.odd >> j & 1, 0)) {
                unusual(group, 0.f, index + first + j, dither, out, scales + first + j);
                continue;
            }
            scales[first + j] = s.stored[j];
            if (noisy) {
                noise_of_group(&p, index + first + j, noise);
            }
            if (format == GCK_E4M3 && dtype == GCK_BF16 && !noisy
                && __builtin_expect(encode_e4m3_bf16(group, s.stored[j], s.multiplier[j], out, c, stream), 1)) {
                continue;
            }
            encode_group(format, dtype, group, s.multiplier[j], noisy ? noise : NULL, out, c, stream);
        }
    }
}

/* ---- decode: fp8 ---- */

/* Steps s with 2^-100 <= s < 2^7: every product is normal, and s * 2^120 is finite. */
INLINE int fp8_step_is_ordinary(gck_format format, uint16_t scale)
{
    const int unit = 127 + (format == GCK_E5M2 ? 40 : 32);       /* the exponent of s = 1 */
    return scale >= (unit - 100) << 7 && scale < (unit + 7) << 7;
}

INLINE float fp8_step_of(gck_format format, uint16_t scale)
{
    return gck_float((uint32_t)scale << 16) * (format == GCK_E5M2 ? 0x1p-40f : 0x1p-32f);
}

/* Codes in the upper bytes -> values / gck_fp8_shift(). */
INLINE __m256 values_of(gck_format format, __m256i c)
{
    return _mm256_castsi256_ps(format == GCK_E4M3
        ? _mm256_and_si256(_mm256_srai_epi32(c, 4), _mm256_set1_epi32((int)0x87F00000))
        : _mm256_and_si256(_mm256_srai_epi32(c, 3), _mm256_set1_epi32((int)0x8FE00000)));
}

INLINE void decode_wide(gck_format format, gck_dtype dtype, const uint8_t *codes, float step, char *group,
                        store_constants c, int stream)
{
    const __m256 m = _mm256_set1_ps(step * (format == GCK_E4M3 ? 0x1p120f : 0x1p112f));

    for (int k = 0; k < 8; k++) {
        const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes + k));
        const v16 v = {_mm256_mul_ps(values_of(format, _mm256_slli_epi32(w, 24)), m),
                       _mm256_mul_ps(values_of(format, _mm256_slli_epi32(w, 8)), m)};
        store16(group, dtype, k, v, _mm256_setzero_si256(), c, stream);
    }
}

/* bfloat16 keeps the exponent of a product when the code's exponent moves, so 16 products
 * a group are enough.  With u the 4 bits of a code above the lower three:
 *   u = 0: table[code];   u > 0: table[8 + lower three] + u units of the exponent. */
typedef struct {
    __m256i low, high;                   /* bytes of the table, in both halves */
} bf16_table;

typedef struct {
    __m256  first, second;               /* the values of codes 0..7, 8..15, times the unit's inverse */
    __m256i one, half, exponent, low_byte;
    __m256i abs, seven, eight;           /* bytes */
    __m256i sign_exponent;               /* 16-bit lanes */
    __m256i low_order, high_order;
} bf16_constants;

/* float32 >= 0 -> bfloat16 in the lower halves. */
INLINE __m256i to_bf16(__m256 v, bf16_constants q)
{
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), q.one);
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, q.half), odd), 16);
}

INLINE bf16_constants bf16_constants_of(gck_format format)
{
    const int e4m3 = format == GCK_E4M3;
    return (bf16_constants){
        .first = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7),
        .second = e4m3 ? _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15) : _mm256_setr_ps(8, 10, 12, 14, 16, 20, 24, 28),
        .one = kept(1), .half = kept(0x7FFF), .exponent = kept(e4m3 ? 0x80 : 0x100), .low_byte = kept(0x00FF00FFu),
        .abs = kept(0x7F7F7F7Fu), .seven = kept(0x07070707u), .eight = kept(0x08080808u),
        .sign_exponent = kept(e4m3 ? 0x87808780u : 0x8F008F00u),
        .low_order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5), .high_order = _mm256_setr_epi32(2, 6, 3, 7, 2, 6, 3, 7),
    };
}

INLINE bf16_table table_of(gck_format format, float step, bf16_constants q)
{
    const float unit = format == GCK_E4M3 ? 0x1p-9f : 0x1p-16f;          /* the value of code 1 */
    const __m256 s = _mm256_set1_ps(step * unit);
    const __m256i a = to_bf16(_mm256_mul_ps(q.first, s), q);
    const __m256i b = _mm256_sub_epi32(to_bf16(_mm256_mul_ps(q.second, s), q), q.exponent);
    const __m256i w = _mm256_packus_epi32(a, b);
    const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(w, q.low_byte), _mm256_srli_epi16(w, 8));
    return (bf16_table){_mm256_permutevar8x32_epi32(bytes, q.low_order),
                        _mm256_permutevar8x32_epi32(bytes, q.high_order)};
}

/* Move sign and exponent of 16 codes, in the upper bytes of 16-bit lanes, to their place in
 * bfloat16. */
INLINE __m256i exponents_of(gck_format format, __m256i c, __m256i sign_exponent)
{
    return _mm256_and_si256(_mm256_srai_epi16(c, format == GCK_E4M3 ? 4 : 3), sign_exponent);
}

INLINE void decode_bf16(gck_format format, const uint8_t *codes, float step, char *group, bf16_constants q, int stream)
{
    const bf16_table t = table_of(format, step, q);
    const __m256i zero = _mm256_setzero_si256();

    for (int k = 0; k < 4; k++) {
        const __m256i c = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)codes + k), 0xD8);
        const __m256i abs = _mm256_and_si256(c, q.abs);
        const __m256i above = _mm256_or_si256(_mm256_and_si256(c, q.seven), q.eight);
        const __m256i index = _mm256_min_epu8(abs, above);
        const __m256i low = _mm256_shuffle_epi8(t.low, index), high = _mm256_shuffle_epi8(t.high, index);
        const __m256i first = exponents_of(format, _mm256_unpacklo_epi8(zero, c), q.sign_exponent);
        const __m256i second = exponents_of(format, _mm256_unpackhi_epi8(zero, c), q.sign_exponent);
        store(group + 64 * k, _mm256_add_epi16(_mm256_unpacklo_epi8(low, high), first), stream);
        store(group + 64 * k + 32, _mm256_add_epi16(_mm256_unpackhi_epi8(low, high), second), stream);
    }
}

/* ---- decode: int8_plain ---- */

typedef struct {
    __m256i exponent, even_bytes, odd_bytes;
    __m256  bias;
} integer_constants;

INLINE integer_constants integer_constants_of(void)
{
    return (integer_constants){
        .exponent = kept(0x47008000u),
        .even_bytes = _mm256_setr_epi8(-1, 0, -1, -1, -1, 2, -1, -1, -1, 4, -1, -1, -1, 6, -1, -1,
                                       -1, 8, -1, -1, -1, 10, -1, -1, -1, 12, -1, -1, -1, 14, -1, -1),
        .odd_bytes = _mm256_setr_epi8(-1, 1, -1, -1, -1, 3, -1, -1, -1, 5, -1, -1, -1, 7, -1, -1,
                                      -1, 9, -1, -1, -1, 11, -1, -1, -1, 13, -1, -1, -1, 15, -1, -1),
        .bias = kept_ps(0x1p15f + 128.f),
    };
}

/* code + 128 + 2^15, of the codes that `bytes` moves to bits 8..15 of the lanes.  With
 * 9 bits, 2^15 + 128 times a step is exact, and so is the fused difference. */
INLINE __m256 biased(__m256i codes, __m256i bytes, __m256i exponent)
{
    return _mm256_castsi256_ps(_mm256_xor_si256(_mm256_shuffle_epi8(codes, bytes), exponent));
}

INLINE void decode_integers(gck_dtype dtype, const uint8_t *codes, __m256 step, char *group, integer_constants q,
                            store_constants c, int stream)
{
    const __m256 zero = _mm256_mul_ps(step, q.bias);

    for (int k = 0; k < 8; k++) {
        const __m256i w = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes + k));
        const __m256 even = biased(w, q.even_bytes, q.exponent), odd = biased(w, q.odd_bytes, q.exponent);
        store16(group, dtype, k, (v16){_mm256_fmsub_ps(even, step, zero), _mm256_fmsub_ps(odd, step, zero)},
                _mm256_setzero_si256(), c, stream);
    }
}

/* ---- decode ---- */

INLINE void decode(gck_format format, gck_dtype dtype, const uint8_t *codes, const uint16_t *scales, int64_t ngroups,
                   void *x, int64_t index, decode_unusual *unusual, int stream)
{
    const size_t stride = group_nbytes(dtype);
    const store_constants c = store_constants_of();
    const bf16_constants q = bf16_constants_of(format);
    const integer_constants i = integer_constants_of();
    char *group = x;

    (void)index;                                 /* nothing depends on it */
    for (int64_t g = 0; g < ngroups; g++, codes += GCK_GROUP, group += stride) {
        const int ordinary = gck_is_fp8(format) ? fp8_step_is_ordinary(format, scales[g]) : step_is_ordinary(scales[g]);
        if (!ordinary && !is_zero_group(format, codes, scales[g])) {
            unusual(codes, scales + g, 0, group);
        } else if (!gck_is_fp8(format)) {
            decode_integers(dtype, codes, step_of(scales[g]), group, i, c, stream);
        } else if (dtype == GCK_BF16) {
            decode_bf16(format, codes, fp8_step_of(format, scales[g]), group, q, stream);
        } else {
            decode_wide(format, dtype, codes, fp8_step_of(format, scales[g]), group, c, stream);
        }
    }
}

X86_DTYPES(avx2, GCK_E4M3, encode, decode)
X86_DTYPES(avx2, GCK_E5M2, encode, decode)
X86_DTYPES(avx2, GCK_INT8_PLAIN, encode, decode)

#else
typedef int gck_unrotated_avx2_is_empty;     /* ISO C requires a declaration in every file */
#endif
