/* int8_plain_avx512.c: int8_plain on AVX-512. */
#if defined(__x86_64__)
#include "codec/x86/integer_avx512.h"
#include "codec/x86/noise_avx512.h"

/* ---- encode ---- */

/* noise: of the group; NULL rounds to nearest. */
INLINE void encode_group(const constants *c, gck_dtype dtype, const void *x, float multiplier, const __m512i *noise,
                         uint8_t *codes, int stream)
{
    const __m512 inverse = _mm512_set1_ps(multiplier);
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

/* The loop of fp8_avx512.c, once more: what it does with an ordinary group shares its registers. */
INLINE void encode_groups(gck_format format, gck_dtype dtype, const void *x, int64_t ngroups,
                          uint8_t *codes, uint16_t *scales, int64_t index, const gck_dither *dither, int streaming)
{
    const int stream = can_stream(codes, streaming);
    const constants c = make_constants(format, dtype);
    const philox p = philox_of(dither);
    tile t = {.ordinary = 0};
    __m512i noise[4];

    for (int64_t first = 0; first < ngroups; first += TILE) {
        const char *xt = (const char *)x + (size_t)first * group_bytes(dtype);
        const int count = (int)(ngroups - first < TILE ? ngroups - first : TILE);

        for (int i = 0; i < count; i++) {
            t.amax[i] = abs_max_bits(&c, xt + (size_t)i * group_bytes(dtype), dtype);
        }
        tile_scales(&t, format, dtype, dither != NULL);
        for (int i = 0; i < count; i++) {
            const char *xg = xt + (size_t)i * group_bytes(dtype);
            uint8_t *cg = codes + (first + i) * GCK_GROUP;

            if (!(t.ordinary >> i & 1)) {
                encode_rare(format, xg, dtype, t.amax[i], index + first + i, dither, cg, scales + first + i);
                continue;
            }
            if (dither != NULL) {
                noise_of_group(&p, index + first + i, noise);
            }
            encode_group(&c, dtype, xg, t.multiplier[i], dither != NULL ? noise : NULL, cg, stream);
            scales[first + i] = (uint16_t)t.stored[i];
        }
    }
    if (stream) {
        _mm_sfence();
    }
}

/* ---- decode ---- */

/* Codes 32 k .. 32 k + 31 to bfloat16, without a conversion: a byte placed at bit 15 of 256.0 makes
 * 256 + (code ^ 0x80) = 384 + code.  (384 + code) * s - 384 * s by FMA is code * s: that has 15
 * bits, so it is exact, and +0 for code 0. */
INLINE __m512i decode_bf16(const constants *c, const uint8_t *codes, __m512 step, __m512 minus_384_steps)
{
    const __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    const __m512 lo = _mm512_castsi512_ps(and_xor(_mm512_slli_epi32(w, 15), c->field, c->bias));
    const __m512 hi = _mm512_castsi512_ps(and_xor(_mm512_srli_epi32(w, 1), c->field, c->bias));

    return to_bf16(c, _mm512_fmadd_ps(lo, step, minus_384_steps), _mm512_fmadd_ps(hi, step, minus_384_steps));
}

INLINE __m512 decode_floats(const uint8_t *codes, __m512 step)
{
    const __m512i q = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes));

    return _mm512_mul_ps(_mm512_cvtepi32_ps(q), step);
}

INLINE void decode_group(const constants *c, gck_dtype dtype, const uint8_t *codes, uint32_t scale,
                         void *x, int stream)
{
    const __m512 stored = _mm512_castsi512_ps(_mm512_set1_epi32((int)(scale << 16)));
    const __m512 step = _mm512_mul_ps(stored, c->step);
    const __m512 minus_384_steps = _mm512_mul_ps(stored, c->minus_384_steps);

    for (int k = 0; k < 4; k++) {
        if (dtype == GCK_BF16) {
            put((char *)x + 64 * k, decode_bf16(c, codes + 32 * k, step, minus_384_steps), stream);
        } else {
            put_pair(c, x, dtype, k, decode_floats(codes + 32 * k, step),
                     decode_floats(codes + 32 * k + 16, step), stream);
        }
    }
}

/* The product is taken once where the reference takes two.  Both are equal if the step is normal,
 * from biased exponent 33 of the stored scale on. */
INLINE int ordinary_scale(uint32_t scale)
{
    const uint32_t low = 33u << 7;

    return scale - low < (255u << 7) - low;
}

INLINE void decode_groups(gck_format format, gck_dtype dtype, const uint8_t *codes, const uint16_t *scales,
                          int64_t ngroups, void *x, int64_t index, int streaming)
{
    const int stream = can_stream(x, streaming);
    const constants c = make_constants(format, dtype);

    for (int64_t g = 0; g < ngroups; g++) {
        char *xg = (char *)x + (size_t)g * group_bytes(dtype);

        if (ordinary_scale(scales[g])) {
            decode_group(&c, dtype, codes + g * GCK_GROUP, scales[g], xg, stream);
        } else {
            decode_rare(format, codes + g * GCK_GROUP, scales + g, index + g, xg, dtype);
        }
    }
    if (stream) {
        _mm_sfence();
    }
}

GCK_AVX512_DTYPES(GCK_AVX512_BODY, GCK_INT8_PLAIN)

#else
typedef int gck_int8_plain_avx512_is_empty;      /* ISO C requires a declaration in every file */
#endif
