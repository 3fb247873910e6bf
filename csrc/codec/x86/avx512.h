/* avx512.h: what the AVX-512 kernels share: layouts, loads, stores, rare groups.
 *
 * Only F, BW, DQ and VL.  With GCK_EMULATE_AVX512 the same text is compiled against
 * portable C, so that a machine without AVX-512 can compare its bytes too.
 *
 * 128 values are held as four pairs of registers.  `lo` and `hi` of pair k are
 *     bfloat16   the even and the odd values of 32 k .. 32 k + 31: a packed register
 *                is taken apart, and put together, by one shift and one mask;
 *     others     values 32 k .. 32 k + 15 and 32 k + 16 .. 32 k + 31. */
#ifndef GRADCKPT_AVX512_H
#define GRADCKPT_AVX512_H

#include "codec/format/group.h"
#include "codec/x86/kernels_avx512.h"

#ifdef GCK_EMULATE_AVX512
#include "../../../tests/native/avx512_emulation.h"
#define INLINE static inline                       /* without it a compiler would need minutes */
#else
#include <immintrin.h>
#define INLINE static inline __attribute__((always_inline))
#endif
#define TABLE static const __attribute__((aligned(64), unused))

/* ---- memory ---- */

/* Non-temporal stores need the alignment; sfence() orders them before what follows. */
INLINE int can_stream(const void *out, int streaming) { return streaming && ((uintptr_t)out & 63u) == 0; }

#include "codec/x86/common_x86.h"

INLINE void put(void *at, __m512i v, int stream)
{
    if (stream) {
        _mm512_stream_si512((__m512i *)at, v);
    } else {
        _mm512_storeu_si512(at, v);
    }
}

/* Half a register, aligned to 32 bytes if streaming. */
INLINE void put_half(void *at, __m256i v, int stream)
{
    if (stream) {
        _mm256_stream_si256((__m256i *)at, v);
    } else {
        _mm256_storeu_si256((__m256i *)at, v);
    }
}

INLINE __m512 table_ps(const float *aligned) { return _mm512_castsi512_ps(_mm512_loadu_si512(aligned)); }

/* ---- constants ---- */

INLINE __m512i all32(uint32_t word) { return _mm512_set1_epi32((int)word); }
INLINE __m512i all16(uint32_t word) { return all32(word * 0x10001u); }
INLINE __m512 all_ps(float f) { return _mm512_castsi512_ps(all32(gck_bits(f))); }

/* gcc 12 rebuilds a constant it knows at each use, inside the loop and on the shuffle port.  It
 * cannot know one that comes out of an asm, and keeps it in a register. */
INLINE __m512i keep(__m512i v)
{
#ifndef GCK_EMULATE_AVX512
    __asm__("" : "+v"(v));
#endif
    return v;
}

INLINE __m512 keep_ps(__m512 v) { return _mm512_castsi512_ps(keep(_mm512_castps_si512(v))); }

/* Constants made once before a loop; those that a kernel does not use cost nothing. */
typedef struct {
    __m512i upper, abs, abs32, odd, half, ones;  /* `odd`: bit 0 of words; `half`: bit 15 */
    __m512  max_f16, min_f16;
    __m512i fp8_last, fp8_round;                 /* encode: see fp8_words()               */
    __m512i sign_bytes;
    __m512i fp8_code, fp8_row, fp8_normal;       /* decode: see decode_words(); in lanes  */
    __m512i fp8_rest;                            /* of 16 bits for bfloat16, else of 32   */
    __m512  magic, step, minus_384_steps;        /* int8                                  */
    __m512i field, bias;
    __m512i plus_bytes, plus_minus_bytes, plus_words, plus_minus_words;
    __m512i odd_bytes;                           /* 0, 1, 0, 1 ...                        */
    __m512i low_nibble, high_nibble, low_six;    /* int6, int4: bits of bytes             */
    __m512i weights_1_16, weights_1_4, words_1_16;
    /* see int6_values() */
    __m512i fifth_even, sign_even, fifth_odd, sign_odd;
} constants;

INLINE constants make_constants(gck_format format, gck_dtype dtype)
{
    const int e4m3 = format == GCK_E4M3, bf16 = dtype == GCK_BF16;
    const uint32_t mantissa = e4m3 ? 7u : 3u;
    constants c = {
        .upper = keep(all32(0xFFFF0000u)),
        .abs = keep(dtype == GCK_F32 ? all32(0x7FFFFFFFu) : all16(0x7FFFu)),
        .abs32 = keep(all32(0x7FFFFFFFu)),
        .odd = keep(all16(1)),
        .half = keep(all16(0x8000u)),
        .ones = keep(all32(~0u)),
        .max_f16 = keep_ps(all_ps(65472.f)),
        .min_f16 = keep_ps(all_ps(-65472.f)),
        .fp8_last = keep(all32(e4m3 ? 1u << 20 : 1u << 21)),
        .fp8_round = keep(all16(e4m3 ? 1u << 11 : 1u << 10)),
        .sign_bytes = keep(all32(0x80808080u)),
        .fp8_code = keep(bf16 ? all16(0x7Fu) : all32(0x7Fu)),
        .fp8_row = keep(bf16 ? all16(mantissa) : all32(mantissa)),
        .fp8_normal = keep(bf16 ? all16(mantissa + 1u) : all32(mantissa + 1u)),
        .fp8_rest = keep(bf16 ? all16(e4m3 ? 0x8780u : 0x8F80u)
                         : all32(e4m3 ? 0x87800000u : 0x8F800000u)),
        .magic = keep_ps(all_ps(12582912.f)),
        .step = keep_ps(all_ps(0x1p-32f)),
        .minus_384_steps = keep_ps(all_ps(-384 * 0x1p-32f)),
        .field = keep(all32(0xFFu << 15)),
        .bias = keep(all32(0x43800000u ^ 0x80u << 15)),
        .plus_bytes = keep(all32(0x01010101u)),
        .plus_minus_bytes = keep(all32(0xFF01FF01u)),
        .plus_words = keep(all32(0x00010001u)),
        .plus_minus_words = keep(all32(0xFFFF0001u)),
        .odd_bytes = keep(all16(0x0100u)),
        .low_nibble = keep(all32(0x0F0F0F0Fu)),
        .high_nibble = keep(all32(0xF0F0F0F0u)),
        .low_six = keep(all32(0x3F3F3F3Fu)),
        .weights_1_16 = keep(all16(0x1001u)),
        .weights_1_4 = keep(all16(0x0401u)),
        .words_1_16 = keep(all32(0x00100001u)),
        .fifth_even = keep(_mm512_set1_epi64(0x1010101001010101)),
        .sign_even = keep(_mm512_set1_epi64(0x2020202002020202)),
        .fifth_odd = keep(_mm512_set1_epi64(0x4040404004040404)),
        .sign_odd = keep(_mm512_set1_epi64(0x8080808008080808u)),
    };
    return c;
}

/* ---- bits ---- */

/* The first operand is overwritten: a temporary there saves a move. */
INLINE __m512i and_or(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0xEA); }
INLINE __m512i or_and(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0xF8); }
INLINE __m512i and_xor(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0x6A); }

/* `one` where mask is set, else `zero`. */
INLINE __m512i blend_one(__m512i one, __m512i mask, __m512i zero)
{
    return _mm512_ternarylogic_epi32(one, mask, zero, 0xE2);
}

INLINE __m512i blend_zero(__m512i zero, __m512i mask, __m512i one)
{
    return _mm512_ternarylogic_epi32(zero, mask, one, 0xB8);
}

/* Words lo, hi, lo, hi ... of the upper, or the lower, halves of two registers. */
INLINE __m512i merge_upper(const constants *c, __m512i lo, __m512i hi)
{
    return blend_zero(_mm512_srli_epi32(lo, 16), c->upper, hi);
}

INLINE __m512i merge_lower(const constants *c, __m512i lo, __m512i hi)
{
    return blend_one(_mm512_slli_epi32(hi, 16), c->upper, lo);
}

/* ---- values in ---- */

/* 16 float32 or float16 at x[16 j]. */
INLINE __m512 load16(const void *x, gck_dtype dtype, int j)
{
    return dtype == GCK_F32
        ? _mm512_castsi512_ps(_mm512_loadu_si512((const char *)x + 64 * j))
        : _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const char *)x + 32 * j)));
}

/* 32 packed bfloat16 -> even, odd. */
INLINE void split_bf16(const constants *c, __m512i w, __m512 *lo, __m512 *hi)
{
    *lo = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    *hi = _mm512_castsi512_ps(_mm512_and_si512(w, c->upper));
}

INLINE void load_pair(const constants *c, const void *x, gck_dtype dtype, int k, __m512 *lo, __m512 *hi)
{
    if (dtype == GCK_BF16) {
        split_bf16(c, _mm512_loadu_si512((const char *)x + 64 * k), lo, hi);
    } else {
        *lo = load16(x, dtype, 2 * k);
        *hi = load16(x, dtype, 2 * k + 1);
    }
}

/* Largest |word| of 128 bfloat16 or float16, each lane for itself. */
INLINE __m512i abs_max_words(const constants *k, const void *x)
{
    const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), k->abs);
    const __m512i b = _mm512_and_si512(_mm512_loadu_si512((const char *)x + 64), k->abs);
    const __m512i c = _mm512_and_si512(_mm512_loadu_si512((const char *)x + 128), k->abs);
    const __m512i d = _mm512_and_si512(_mm512_loadu_si512((const char *)x + 192), k->abs);

    return _mm512_max_epu16(_mm512_max_epu16(a, b), _mm512_max_epu16(c, d));
}

INLINE uint32_t largest_u16(__m512i v)
{
    const __m128i a = _mm_max_epu16(_mm512_extracti32x4_epi32(v, 0), _mm512_extracti32x4_epi32(v, 1));
    const __m128i b = _mm_max_epu16(_mm512_extracti32x4_epi32(v, 2), _mm512_extracti32x4_epi32(v, 3));
    const __m128i not_max = _mm_xor_si128(_mm_max_epu16(a, b), _mm_set1_epi32(-1));

    return (uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(not_max)) ^ 0xFFFFu;   /* upper word: index 0..7 */
}

INLINE uint32_t largest_u32(__m512i v)
{
    const __m128i a = _mm_max_epu32(_mm512_extracti32x4_epi32(v, 0), _mm512_extracti32x4_epi32(v, 1));
    const __m128i b = _mm_max_epu32(_mm512_extracti32x4_epi32(v, 2), _mm512_extracti32x4_epi32(v, 3));
    const __m128i c = _mm_max_epu32(a, b);
    const __m128i d = _mm_max_epu32(c, _mm_shuffle_epi32(c, 0x4E));

    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(d, _mm_shuffle_epi32(d, 0xB1)));
}

/* max |x| in the bits of its dtype, compared as integers, so that NaN and Inf come out largest. */
INLINE uint32_t abs_max_raw(const constants *c, const void *x, gck_dtype dtype)
{
    if (dtype != GCK_F32) {
        return largest_u16(abs_max_words(c, x)) & 0xFFFFu;
    }
    __m512i max = all32(0);
    for (int j = 0; j < 8; j++) {
        const __m512i bits = _mm512_loadu_si512((const char *)x + 64 * j);
        max = _mm512_max_epu32(max, _mm512_and_si512(bits, c->abs));
    }
    return largest_u32(max);
}

/* The same as float32. */
INLINE uint32_t bits_of_raw(uint32_t raw, gck_dtype dtype)
{
    return dtype == GCK_F32 ? raw : dtype == GCK_BF16 ? raw << 16 : gck_bits(gck_from_f16((uint16_t)raw));
}

INLINE uint32_t abs_max_bits(const constants *c, const void *x, gck_dtype dtype)
{
    return bits_of_raw(abs_max_raw(c, x, dtype), dtype);
}

/* ---- codes out ---- */

/* Two registers of 32 pair-ordered words, packed in each 128-bit lane to bytes, hold
 * the bytes of 64 values.  For bfloat16 only the lanes are out of order; for others
 * lo and hi alternate as well. */
TABLE uint32_t order_bf16[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
TABLE uint32_t order_lanes[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
#define LANE_OF_BYTES 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15
TABLE uint8_t order_bytes[64] = {LANE_OF_BYTES, LANE_OF_BYTES, LANE_OF_BYTES, LANE_OF_BYTES};
#undef LANE_OF_BYTES

INLINE __m512i natural_bytes(__m512i packed, gck_dtype dtype)
{
    if (dtype == GCK_BF16) {
        return _mm512_permutexvar_epi32(_mm512_loadu_si512(order_bf16), packed);
    }
    return _mm512_permutexvar_epi32(_mm512_loadu_si512(order_lanes),
                                    _mm512_shuffle_epi8(packed, _mm512_loadu_si512(order_bytes)));
}

/* ---- values out ---- */

/* bfloat16 of two registers of finite values, to nearest even: 32 words lo, hi, lo, hi ... A word
 * is rounded up when its dropped half is over 0x8000, or equals it and the word is odd: when
 * dropped | (word & 1) is over 0x8000. */
INLINE __m512i to_bf16(const constants *c, __m512 lo, __m512 hi)
{
    const __m512i kept = merge_upper(c, _mm512_castps_si512(lo), _mm512_castps_si512(hi));
    const __m512i dropped = merge_lower(c, _mm512_castps_si512(lo), _mm512_castps_si512(hi));
    const __mmask32 up = _mm512_cmpgt_epu16_mask(or_and(dropped, kept, c->odd), c->half);

    return _mm512_mask_sub_epi16(kept, up, kept, c->ones);
}

INLINE __m256i to_f16(const constants *c, __m512 v)
{
    v = _mm512_max_ps(_mm512_min_ps(v, c->max_f16), c->min_f16);
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* 32 finite values in natural order to x[32 k]; float32 or float16. */
INLINE void put_pair(const constants *c, void *x, gck_dtype dtype, int k, __m512 lo, __m512 hi, int stream)
{
    if (dtype == GCK_F32) {
        put((char *)x + 128 * k, _mm512_castps_si512(lo), stream);
        put((char *)x + 128 * k + 64, _mm512_castps_si512(hi), stream);
    } else {
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(to_f16(c, lo)), to_f16(c, hi), 1);
        put((char *)x + 64 * k, both, stream);
    }
}

/* ---- scales, 16 groups at a time ---- */

enum { TILE = 16 };

/* The scales of up to TILE groups, computed together so that the division and the way through the
 * integer units are paid once and off the path of any one group. */
typedef struct {
    uint32_t amax[TILE];                           /* float32 bits */
    uint32_t stored[TILE];
    float    multiplier[TILE];
    uint32_t ordinary;                             /* bit i: group i; stored, multiplier are valid */
} tile;

/* Unrotated formats: gck_stored(), gck_multiplier() of 16 amax.  Escapes lie beyond the upper
 * bound: their bits are larger than those of any ordinary value. */
INLINE void tile_scales(tile *t, gck_format format, gck_dtype dtype, int noisy)
{
    const int fp8 = format == GCK_E4M3 || format == GCK_E5M2;
    const uint32_t low = gck_bits(GCK_TINY);
    const uint32_t end = fp8 ? gck_bits(GCK_LARGE) : gck_limit(dtype) + 1u;
    const __m512i amax = _mm512_loadu_si512(t->amax);
    const __m512i u = _mm512_castps_si512(
        _mm512_mul_ps(_mm512_castsi512_ps(amax), _mm512_set1_ps(gck_step_factor(format, 0, noisy))));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), all32(1));
    const __m512i up = fp8 && !noisy ? _mm512_add_epi32(all32(0x7FFFu), odd) : all32(0xFFFFu);
    const __m512i stored = _mm512_srli_epi32(_mm512_add_epi32(u, up), 16);
    const __m512 step = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(stored, 16)),
                                      _mm512_set1_ps(format == GCK_E5M2 ? 0x1p-40f : 0x1p-32f));
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.f), step);
    const __m512 m = fp8 ? _mm512_mul_ps(inverse, _mm512_set1_ps(gck_fp8_shift(format))) : inverse;

    t->ordinary = _mm512_cmplt_epu32_mask(_mm512_add_epi32(amax, all32(0u - low)), all32(end - low));
    _mm512_storeu_si512(t->stored, stored);
    _mm512_storeu_si512(t->multiplier, _mm512_castps_si512(m));
}

/* ---- vectors, for templates ---- */

typedef __m512i vec;

INLINE vec v_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void v_store(void *p, vec v, int stream) { put(p, v, stream); }

INLINE vec v_kept(uint32_t word) { return keep(all32(word)); }
INLINE vec v_all32(uint32_t word) { return all32(word); }
INLINE vec v_all16(uint32_t word) { return all16(word & 0xFFFFu); }

INLINE vec v_and(vec a, vec b) { return _mm512_and_si512(a, b); }

/* By words: of 32 bits for float32, else of 16. */
INLINE vec v_add(vec a, vec b, gck_dtype d) { return d == GCK_F32 ? _mm512_add_epi32(a, b) : _mm512_add_epi16(a, b); }
INLINE vec v_max(vec a, vec b, gck_dtype d) { return d == GCK_F32 ? _mm512_max_epu32(a, b) : _mm512_max_epu16(a, b); }

INLINE vec v_shl(vec a, int n, gck_dtype d)
{
    return d == GCK_F32 ? _mm512_slli_epi32(a, (unsigned)n) : _mm512_slli_epi16(a, (unsigned)n);
}

INLINE vec v_shr(vec a, int n, gck_dtype d)
{
    return d == GCK_F32 ? _mm512_srli_epi32(a, (unsigned)n) : _mm512_srli_epi16(a, (unsigned)n);
}

#endif
