/* avx512_emulation.h: the AVX-512 intrinsics of csrc/codec/x86/avx512.h and its users, in
 * portable C, so that their bytes are compared on machines without AVX-512.
 *
 * Included instead of <immintrin.h> when GCK_EMULATE_AVX512 is defined.  Semantics from
 * the Intel Intrinsics Guide and the SDM; floats are the compiler's IEEE float32, with
 * the default environment.  Slow on purpose: one lane after the other.  128-bit
 * registers are the real ones (SSE4.1). */
#ifndef GRADCKPT_AVX512_EMULATION_H
#define GRADCKPT_AVX512_EMULATION_H

#include <math.h>
#include <smmintrin.h>
#include <stdint.h>
#include <string.h>

/* Distinct types, so that a missing cast is an error here as it is there. */
typedef union {
    int8_t   i8[64];
    uint8_t  u8[64];
    int16_t  i16[32];
    uint16_t u16[32];
    int32_t  i32[16];
    uint32_t u32[16];
    uint64_t u64[8];
} __m512i;
typedef struct { float f[16]; } __m512;
typedef union {
    int8_t   i8[32];
    uint8_t  u8[32];
    uint16_t u16[16];
    uint32_t u32[8];
    uint64_t u64[4];
} __m256i;
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;
typedef uint64_t __mmask64;

#define OP static inline __attribute__((unused))

/* A function of n lanes; `value` is lane i of the result, of operands a and b. */
#define UNARY(name, R, result, A, n, value)                 \
    OP R name(A a)                                          \
    {                                                       \
        R r;                                                \
        for (int i = 0; i < n; i++) {                       \
            r.result[i] = value;                            \
        }                                                   \
        return r;                                           \
    }
#define BINARY(name, R, result, A, B, n, value)             \
    OP R name(A a, B b)                                     \
    {                                                       \
        R r;                                                \
        for (int i = 0; i < n; i++) {                       \
            r.result[i] = value;                            \
        }                                                   \
        return r;                                           \
    }
#define TERNARY(name, R, result, A, B, C, n, value)         \
    OP R name(A a, B b, C c)                                \
    {                                                       \
        R r;                                                \
        for (int i = 0; i < n; i++) {                       \
            r.result[i] = value;                            \
        }                                                   \
        return r;                                           \
    }
#define INTEGERS(name, result, n, value) BINARY(name, __m512i, result, __m512i, __m512i, n, value)
#define SHIFT(name, result, n, value)    BINARY(name, __m512i, result, __m512i, unsigned, n, value)
#define FLOATS(name, value)              BINARY(name, __m512, f, __m512, __m512, 16, value)
/* Where the mask has a bit, `value`; elsewhere the first operand. */
#define MASKED(name, M, lanes, n, value)                    \
    OP __m512i name(__m512i otherwise, M m, __m512i a, __m512i b) \
    {                                                       \
        for (int i = 0; i < n; i++) {                       \
            otherwise.lanes[i] = m >> i & 1 ? value : otherwise.lanes[i]; \
        }                                                   \
        return otherwise;                                   \
    }
/* b where the mask has a bit. */
#define BLEND(name, R, M, lanes, n)                         \
    OP R name(M m, R a, R b)                                \
    {                                                       \
        for (int i = 0; i < n; i++) {                       \
            a.lanes[i] = m >> i & 1 ? b.lanes[i] : a.lanes[i]; \
        }                                                   \
        return a;                                           \
    }
#define SIGNS(name, M, lanes, n, top)                       \
    OP M name(__m512i a)                                    \
    {                                                       \
        M m = 0;                                            \
        for (int i = 0; i < n; i++) {                       \
            m |= (M)((M)(a.lanes[i] >> top) << i);          \
        }                                                   \
        return m;                                           \
    }
#define MASK(name, M, n, condition)                         \
    OP M name(__m512i a, __m512i b)                         \
    {                                                       \
        M m = 0;                                            \
        for (int i = 0; i < n; i++) {                       \
            m |= (M)((M)(condition) << i);                  \
        }                                                   \
        return m;                                           \
    }

/* The same bits, or the first of them. */
#define CAST(name, R, A)                                    \
    OP R name(A a)                                          \
    {                                                       \
        R r;                                                \
        memcpy(&r, &a, sizeof r);                           \
        return r;                                           \
    }

/* ---- memory, constants, casts ---- */

OP __m512i _mm512_loadu_si512(const void *p)
{
    __m512i r;
    memcpy(&r, p, sizeof r);
    return r;
}

OP void _mm512_storeu_si512(void *p, __m512i v) { memcpy(p, &v, sizeof v); }

/* The real one faults unless aligned. */
OP void _mm512_stream_si512(__m512i *p, __m512i v)
{
    if (((uintptr_t)p & 63u) != 0) {
        __builtin_trap();
    }
    memcpy(p, &v, sizeof v);
}

OP void _mm256_storeu_si256(__m256i *p, __m256i v) { memcpy((void *)p, &v, sizeof v); }

OP void _mm256_stream_si256(__m256i *p, __m256i v)
{
    if (((uintptr_t)p & 31u) != 0) {
        __builtin_trap();
    }
    memcpy((void *)p, &v, sizeof v);
}

/* Lanes that the mask leaves out are not touched: they need not be there. */
#define LOAD_SOME(name, R, lanes, M, n)                     \
    OP R name(M m, const void *p)                           \
    {                                                       \
        R r;                                                \
        for (int i = 0; i < n; i++) {                       \
            r.lanes[i] = 0;                                 \
            if (m >> i & 1) {                               \
                memcpy(&r.lanes[i], (const char *)p + i * sizeof r.lanes[i], sizeof r.lanes[i]); \
            }                                               \
        }                                                   \
        return r;                                           \
    }
LOAD_SOME(_mm512_maskz_loadu_epi16, __m512i, u16, __mmask32, 32)
LOAD_SOME(_mm512_maskz_loadu_epi32, __m512i, u32, __mmask16, 16)
LOAD_SOME(_mm256_maskz_loadu_epi16, __m256i, u16, __mmask16, 16)

OP __m256i _mm256_loadu_si256(const __m256i *p)
{
    __m256i r;
    memcpy(&r, (const void *)p, sizeof r);
    return r;
}

UNARY(_mm512_set1_epi32, __m512i, i32, int, 16, a)
UNARY(_mm512_set1_epi64, __m512i, u64, long long, 8, (uint64_t)a)

OP __m512i _mm512_broadcast_i32x4(__m128i a)
{
    __m512i r;
    for (int lane = 0; lane < 4; lane++) {
        memcpy(r.u32 + 4 * lane, &a, sizeof a);
    }
    return r;
}

OP __m512i _mm512_setzero_si512(void) { return _mm512_set1_epi32(0); }

UNARY(_mm512_set1_ps, __m512, f, float, 16, a)
CAST(_mm512_castsi512_ps, __m512, __m512i)
CAST(_mm512_castps_si512, __m512i, __m512)

/* The upper half is undefined: made loud. */
OP __m512i _mm512_castsi256_si512(__m256i v)
{
    __m512i r;
    memset(&r, 0xA5, sizeof r);
    memcpy(&r, &v, sizeof v);
    return r;
}

CAST(_mm512_castsi512_si256, __m256i, __m512i)

OP __m256i _mm512_extracti64x4_epi64(__m512i a, int half)
{
    __m256i r;
    memcpy(&r, a.u64 + 4 * (half & 1), sizeof r);
    return r;
}

OP __m512i _mm512_inserti64x4(__m512i a, __m256i b, int half)
{
    memcpy(a.u64 + 4 * (half & 1), &b, sizeof b);
    return a;
}

OP __m128i _mm512_extracti32x4_epi32(__m512i a, int lane)
{
    return _mm_loadu_si128((const __m128i *)(const void *)(a.u32 + 4 * (lane & 3)));
}

/* ---- bits ---- */

INTEGERS(_mm512_and_si512, u64, 8, a.u64[i] & b.u64[i])
INTEGERS(_mm512_xor_si512, u64, 8, a.u64[i] ^ b.u64[i])
SHIFT(_mm512_slli_epi32, u32, 16, b > 31 ? 0 : a.u32[i] << b)
SHIFT(_mm512_srli_epi32, u32, 16, b > 31 ? 0 : a.u32[i] >> b)
SHIFT(_mm512_srli_epi16, u16, 32, (uint16_t)(b > 15 ? 0 : a.u16[i] >> b))
SHIFT(_mm512_slli_epi16, u16, 32, (uint16_t)(b > 15 ? 0 : (uint32_t)a.u16[i] << b))

/* Bit 4 a + 2 b + c of `table` for every three bits a, b, c. */
OP __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table)
{
    __m512i r;
    for (int i = 0; i < 8; i++) {
        r.u64[i] = 0;
        for (int n = 0; n < 8; n++) {
            const uint64_t here = (n & 4 ? a.u64[i] : ~a.u64[i]) & (n & 2 ? b.u64[i] : ~b.u64[i])
                                & (n & 1 ? c.u64[i] : ~c.u64[i]);
            r.u64[i] |= table >> n & 1 ? here : 0;
        }
    }
    return r;
}

/* ---- integers ---- */

INTEGERS(_mm512_add_epi32, u32, 16, a.u32[i] + b.u32[i])
INTEGERS(_mm512_add_epi16, u16, 32, (uint16_t)(a.u16[i] + b.u16[i]))
INTEGERS(_mm512_sub_epi16, u16, 32, (uint16_t)(a.u16[i] - b.u16[i]))
INTEGERS(_mm512_add_epi8, u8, 64, (uint8_t)(a.u8[i] + b.u8[i]))
INTEGERS(_mm512_sub_epi8, u8, 64, (uint8_t)(a.u8[i] - b.u8[i]))
INTEGERS(_mm512_subs_epu8, u8, 64, (uint8_t)(a.u8[i] > b.u8[i] ? a.u8[i] - b.u8[i] : 0))
INTEGERS(_mm512_avg_epu8, u8, 64, (uint8_t)((a.u8[i] + b.u8[i] + 1) >> 1))
INTEGERS(_mm512_min_epu8, u8, 64, a.u8[i] < b.u8[i] ? a.u8[i] : b.u8[i])
INTEGERS(_mm512_max_epu32, u32, 16, a.u32[i] > b.u32[i] ? a.u32[i] : b.u32[i])
INTEGERS(_mm512_min_epu32, u32, 16, a.u32[i] < b.u32[i] ? a.u32[i] : b.u32[i])
INTEGERS(_mm512_max_epu16, u16, 32, a.u16[i] > b.u16[i] ? a.u16[i] : b.u16[i])
INTEGERS(_mm512_max_epi32, i32, 16, a.i32[i] > b.i32[i] ? a.i32[i] : b.i32[i])
INTEGERS(_mm512_max_epi16, i16, 32, a.i16[i] > b.i16[i] ? a.i16[i] : b.i16[i])
INTEGERS(_mm512_min_epu16, u16, 32, a.u16[i] < b.u16[i] ? a.u16[i] : b.u16[i])

/* (a b >> 14) + 1 >> 1, shifts of negative numbers rounding down. */
INTEGERS(_mm512_mulhrs_epi16, i16, 32, (int16_t)((((a.i16[i] * b.i16[i]) >> 14) + 1) >> 1))

OP int32_t saturate(int32_t v, int32_t low, int32_t high) { return v < low ? low : v > high ? high : v; }

/* Bytes of a, unsigned, times bytes of b, signed; two products are added, saturated. */
INTEGERS(_mm512_maddubs_epi16, i16, 32,
         (int16_t)saturate(a.u8[2 * i] * b.i8[2 * i] + a.u8[2 * i + 1] * b.i8[2 * i + 1], -32768, 32767))
INTEGERS(_mm512_madd_epi16, u32, 16,
         (uint32_t)(a.i16[2 * i] * b.i16[2 * i]) + (uint32_t)(a.i16[2 * i + 1] * b.i16[2 * i + 1]))

MASKED(_mm512_mask_add_epi32, __mmask16, u32, 16, a.u32[i] + b.u32[i])
MASKED(_mm512_mask_sub_epi16, __mmask32, u16, 32, (uint16_t)(a.u16[i] - b.u16[i]))
MASKED(_mm512_mask_add_epi8, __mmask64, u8, 64, (uint8_t)(a.u8[i] + b.u8[i]))
MASKED(_mm512_mask_sub_epi8, __mmask64, u8, 64, (uint8_t)(a.u8[i] - b.u8[i]))
BLEND(_mm512_mask_blend_epi16, __m512i, __mmask32, u16, 32)
BLEND(_mm512_mask_blend_ps, __m512, __mmask16, f, 16)
MASKED(_mm512_mask_xor_epi32, __mmask16, u32, 16, a.u32[i] ^ b.u32[i])
/* ---- masks ---- */

MASK(_mm512_testn_epi32_mask, __mmask16, 16, (a.u32[i] & b.u32[i]) == 0)
MASK(_mm512_cmplt_epu32_mask, __mmask16, 16, a.u32[i] < b.u32[i])
MASK(_mm512_cmpgt_epu16_mask, __mmask32, 32, a.u16[i] > b.u16[i])

MASK(_mm512_cmpeq_epi32_mask, __mmask16, 16, a.u32[i] == b.u32[i])
MASK(_mm512_cmpeq_epi16_mask, __mmask32, 32, a.u16[i] == b.u16[i])
MASK(_mm512_cmpgt_epi8_mask, __mmask64, 64, a.i8[i] > b.i8[i])
MASK(_mm512_test_epi8_mask, __mmask64, 64, (a.u8[i] & b.u8[i]) != 0)

SIGNS(_mm512_movepi8_mask, __mmask64, u8, 64, 7)
UNARY(_mm512_movm_epi16, __m512i, u16, __mmask32, 32, a >> i & 1 ? 0xFFFFu : 0)
/* ---- places ---- */

/* Within each 128-bit lane of 16 bytes: the lower half from a, the upper from b. */
#define PACKED(a, b, i) (i % 16 < 8 ? a : b).i16[i / 16 * 8 + i % 8]
INTEGERS(_mm512_packs_epi16, i8, 64, (int8_t)saturate(PACKED(a, b, i), -128, 127))
INTEGERS(_mm512_packus_epi16, u8, 64, (uint8_t)saturate(PACKED(a, b, i), 0, 255))
#undef PACKED

#define PACKED(a, b, i) (i % 8 < 4 ? a : b).i32[i / 8 * 4 + i % 4]
INTEGERS(_mm512_packus_epi32, u16, 32, (uint16_t)saturate(PACKED(a, b, i), 0, 65535))
#undef PACKED

INTEGERS(_mm512_shuffle_epi8, u8, 64, (b.u8[i] & 0x80 ? 0 : a.u8[i / 16 * 16 + (b.u8[i] & 15)]))
INTEGERS(_mm512_permutexvar_epi32, u32, 16, b.u32[a.u32[i] & 15])          /* a: the index */
INTEGERS(_mm512_permutexvar_epi16, u16, 32, b.u16[a.u16[i] & 31])
INTEGERS(_mm512_permutexvar_epi64, u64, 8, b.u64[a.u64[i] & 7])
INTEGERS(_mm512_unpacklo_epi16, u16, 32, (i % 2 ? b : a).u16[i / 8 * 8 + i % 8 / 2])
INTEGERS(_mm512_unpackhi_epi16, u16, 32, (i % 2 ? b : a).u16[i / 8 * 8 + 4 + i % 8 / 2])
INTEGERS(_mm512_unpacklo_epi32, u32, 16, (i % 2 ? b : a).u32[i / 4 * 4 + i % 4 / 2])
INTEGERS(_mm512_unpackhi_epi32, u32, 16, (i % 2 ? b : a).u32[i / 4 * 4 + 2 + i % 4 / 2])

MASKED(_mm512_mask_shuffle_epi8, __mmask64, u8, 64, _mm512_shuffle_epi8(a, b).u8[i])

/* Four 128-bit lanes: two of a, two of b, numbered by two bits each of `which`. */
OP __m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, int which)
{
    __m512i r;
    for (int lane = 0; lane < 4; lane++) {
        memcpy(r.u32 + 4 * lane, (lane < 2 ? a : b).u32 + 4 * (which >> (2 * lane) & 3), 16);
    }
    return r;
}

OP __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int which)
{
    return _mm512_castsi512_ps(_mm512_shuffle_i64x2(_mm512_castps_si512(a), _mm512_castps_si512(b), which));
}

BINARY(_mm512_permute_ps, __m512, f, __m512, int, 16, a.f[i / 4 * 4 + (b >> (2 * (i % 4)) & 3)])
TERNARY(_mm512_permutex2var_ps, __m512, f, __m512, __m512i, __m512, 16, (b.u32[i] & 16 ? c : a).f[b.u32[i] & 15])

/* ---- conversions ---- */

UNARY(_mm512_cvtepi8_epi16, __m512i, i16, __m256i, 32, a.i8[i])
UNARY(_mm512_cvtepi16_epi8, __m256i, u8, __m512i, 32, (uint8_t)a.u16[i])
UNARY(_mm512_abs_epi8, __m512i, u8, __m512i, 64, (uint8_t)(a.i8[i] < 0 ? -a.i8[i] : a.i8[i]))
UNARY(_mm512_cvtepi32_epi16, __m256i, u16, __m512i, 16, (uint16_t)a.u32[i])
UNARY(_mm512_cvtepi32_ps, __m512, f, __m512i, 16, (float)a.i32[i])

OP __m512i _mm512_cvtepi8_epi32(__m128i a)
{
    int8_t bytes[16];
    __m512i r;
    memcpy(bytes, &a, sizeof bytes);
    for (int i = 0; i < 16; i++) {
        r.i32[i] = bytes[i];
    }
    return r;
}

/* IEEE binary16, subnormals and NaN payloads kept, NaNs made quiet. */
OP float float_of_half(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3FFu;
    const uint32_t u = sign | 0x7F800000u | fraction << 13 | (fraction ? 0x400000u : 0);
    float f;

    if (exponent < 31) {
        f = exponent ? ldexpf((float)(1024 + fraction), (int)exponent - 25) : ldexpf((float)fraction, -24);
        return sign ? -f : f;
    }
    memcpy(&f, &u, sizeof f);
    return f;
}

/* To nearest even; overflow to infinity.  Written with nearbyintf, unlike group.h. */
OP uint16_t half_of_float(float f)
{
    const uint16_t sign = signbit(f) ? 0x8000u : 0;
    const float abs = fabsf(f);
    uint32_t u;
    int exponent;

    if (isnan(f)) {
        memcpy(&u, &f, sizeof u);
        return (uint16_t)(sign | 0x7E00u | (u >> 13 & 0x3FFu));
    }
    if (abs >= 65520.f) {
        return (uint16_t)(sign | 0x7C00u);
    }
    frexpf(abs, &exponent);                                       /* abs in [2^(e-1), 2^e) */
    exponent = abs == 0.f || exponent < -13 ? -13 : exponent;
    const float units = nearbyintf(ldexpf(abs, 11 - exponent));   /* <= 2048: carries come right */
    return (uint16_t)(sign | ((uint32_t)(exponent + 13) * 1024u + (uint32_t)units));
}

UNARY(_mm512_cvtph_ps, __m512, f, __m256i, 16, float_of_half(a.u16[i]))

/* Rounding b: to nearest is the only one used. */
BINARY(_mm512_cvtps_ph, __m256i, u16, __m512, int, 16, ((void)b, half_of_float(a.f[i])))

/* ---- floats ---- */

FLOATS(_mm512_add_ps, a.f[i] + b.f[i])
FLOATS(_mm512_sub_ps, a.f[i] - b.f[i])
FLOATS(_mm512_mul_ps, a.f[i] * b.f[i])
FLOATS(_mm512_div_ps, a.f[i] / b.f[i])
FLOATS(_mm512_min_ps, a.f[i] < b.f[i] ? a.f[i] : b.f[i])          /* b if either is NaN */
FLOATS(_mm512_max_ps, a.f[i] > b.f[i] ? a.f[i] : b.f[i])

TERNARY(_mm512_fmadd_ps, __m512, f, __m512, __m512, __m512, 16, fmaf(a.f[i], b.f[i], c.f[i]))

/* Control 0x0B: the operand of larger magnitude, sign cleared; a number before a NaN. */
OP __m512 _mm512_range_ps(__m512 a, __m512 b, int control)
{
    __m512 r;
    if (control != 0x0B) {
        __builtin_trap();
    }
    for (int i = 0; i < 16; i++) {
        const float p = fabsf(a.f[i]), q = fabsf(b.f[i]);
        r.f[i] = isnan(p) ? q : isnan(q) ? p : p > q ? p : q;
    }
    return r;
}

/* ---- lossless, mask, casts ---- */

INTEGERS(_mm512_or_si512, u64, 8, a.u64[i] | b.u64[i])
INTEGERS(_mm512_andnot_si512, u64, 8, ~a.u64[i] & b.u64[i])
INTEGERS(_mm512_sub_epi32, u32, 16, a.u32[i] - b.u32[i])
INTEGERS(_mm512_subs_epu16, u16, 32, (uint16_t)(a.u16[i] > b.u16[i] ? a.u16[i] - b.u16[i] : 0))
INTEGERS(_mm512_mullo_epi16, u16, 32, (uint16_t)((uint32_t)a.u16[i] * b.u16[i]))
MASK(_mm512_cmpeq_epi8_mask, __mmask64, 64, a.u8[i] == b.u8[i])
MASK(_mm512_test_epi16_mask, __mmask32, 32, (a.u16[i] & b.u16[i]) != 0)
UNARY(_mm512_cvtepu16_epi32, __m512i, u32, __m256i, 16, a.u16[i])
UNARY(_mm512_movm_epi8, __m512i, u8, __mmask64, 64, a >> i & 1 ? 0xFFu : 0)

OP __m512i _mm512_maskz_mov_epi8(__mmask64 m, __m512i v) { return _mm512_and_si512(_mm512_movm_epi8(m), v); }

OP __m512i _mm512_maskz_add_epi8(__mmask64 m, __m512i a, __m512i b)
{
    return _mm512_maskz_mov_epi8(m, _mm512_add_epi8(a, b));
}

OP __m512i _mm512_maskz_add_epi16(__mmask32 m, __m512i a, __m512i b)
{
    return _mm512_and_si512(_mm512_movm_epi16(m), _mm512_add_epi16(a, b));
}

MASKED(_mm512_mask_or_epi32, __mmask16, u32, 16, a.u32[i] | b.u32[i])

OP __m512i _mm512_inserti32x4(__m512i a, __m128i b, int lane)
{
    memcpy(a.u32 + 4 * (lane & 3), &b, sizeof b);
    return a;
}

/* ---- stochastic rounding ---- */

#ifndef _CMP_LT_OQ                            /* immintrin.h has them too */
#define _CMP_LT_OQ 0x11
#define _CMP_GE_OQ 0x1D
#define _CMP_UNORD_Q 0x03
#endif

INTEGERS(_mm512_mul_epu32, u64, 8, (uint64_t)a.u32[2 * i] * b.u32[2 * i])
INTEGERS(_mm512_add_epi64, u64, 8, a.u64[i] + b.u64[i])
SHIFT(_mm512_srli_epi64, u64, 8, b > 63 ? 0 : a.u64[i] >> b)
SHIFT(_mm512_slli_epi64, u64, 8, b > 63 ? 0 : a.u64[i] << b)
INTEGERS(_mm512_unpacklo_epi64, u64, 8, (i % 2 ? b : a).u64[i / 2 * 2])
INTEGERS(_mm512_unpackhi_epi64, u64, 8, (i % 2 ? b : a).u64[i / 2 * 2 + 1])
INTEGERS(_mm512_max_epi8, i8, 64, a.i8[i] > b.i8[i] ? a.i8[i] : b.i8[i])
MASK(_mm512_test_epi32_mask, __mmask16, 16, (a.u32[i] & b.u32[i]) != 0)

BLEND(_mm512_mask_blend_epi32, __m512i, __mmask16, u32, 16)

OP __m512i _mm512_mask_sub_epi32(__m512i otherwise, __mmask16 m, __m512i a, __m512i b)
{
    return _mm512_mask_blend_epi32(m, otherwise, _mm512_sub_epi32(a, b));
}

OP __m512 _mm512_mask_sub_ps(__m512 otherwise, __mmask16 m, __m512 a, __m512 b)
{
    return _mm512_mask_blend_ps(m, otherwise, _mm512_sub_ps(a, b));
}

UNARY(_mm512_cvtepi64_epi32, __m256i, u32, __m512i, 8, (uint32_t)a.u64[i])

BINARY(_mm256_max_epu16, __m256i, u16, __m256i, __m256i, 16, a.u16[i] > b.u16[i] ? a.u16[i] : b.u16[i])
BINARY(_mm256_max_epu32, __m256i, u32, __m256i, __m256i, 8, a.u32[i] > b.u32[i] ? a.u32[i] : b.u32[i])

OP __m128i _mm256_extracti128_si256(__m256i a, int half)
{
    return _mm_loadu_si128((const __m128i *)(const void *)(a.u32 + 4 * (half & 1)));
}

OP __m128i _mm256_castsi256_si128(__m256i a) { return _mm256_extracti128_si256(a, 0); }

/* Halves of a (0, 1) and b (2, 3), by two bits each; zeros are not asked for. */
OP __m256i _mm256_permute2x128_si256(__m256i a, __m256i b, int which)
{
    __m256i r;
    for (int half = 0; half < 2; half++) {
        const int from = which >> (4 * half) & 3;
        memcpy(r.u32 + 4 * half, (from & 2 ? b.u32 : a.u32) + 4 * (from & 1), 16);
    }
    return r;
}

SIGNS(_mm512_movepi16_mask, __mmask32, u16, 32, 15)
SIGNS(_mm512_movepi32_mask, __mmask16, u32, 16, 31)

OP __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how)
{
    __mmask16 m = 0;
    if (how != _CMP_LT_OQ && how != _CMP_GE_OQ && how != _CMP_UNORD_Q) {
        __builtin_trap();
    }
    for (int i = 0; i < 16; i++) {
        const int unordered = !(a.f[i] <= b.f[i]) && !(a.f[i] >= b.f[i]);
        m |= (__mmask16)((how == _CMP_LT_OQ ? a.f[i] < b.f[i] : how == _CMP_GE_OQ ? a.f[i] >= b.f[i] : unordered) << i);
    }
    return m;
}

/* What no int can hold becomes the least one. */
OP int32_t int_of_float(float f) { return f >= -0x1p31f && f < 0x1p31f ? (int32_t)f : INT32_MIN; }

UNARY(_mm512_cvttps_epi32, __m512i, i32, __m512, 16, int_of_float(a.f[i]))

OP __m512i _mm512_cvt_roundps_epi32(__m512 a, int rounding)
{
    __m512i r;
    if (rounding != (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)) {
        __builtin_trap();
    }
    for (int i = 0; i < 16; i++) {
        r.i32[i] = int_of_float(floorf(a.f[i]));
    }
    return r;
}

#undef OP
#undef UNARY
#undef BINARY
#undef TERNARY
#undef INTEGERS
#undef SHIFT
#undef LOAD_SOME
#undef FLOATS
#undef MASK
#undef MASKED
#undef BLEND
#undef SIGNS
#undef CAST
#endif
