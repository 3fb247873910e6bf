/* avx2.h: what the AVX2 kernels share: loads, maxima, steps, stores.
 *
 * An ordinary group stays in registers.  Any other group (an escape, zero, tiny, too large, a scale
 * out of range) goes to the portable kernels, so that the odd cases are written only in group.h. */
#ifndef GRADCKPT_AVX2_H
#define GRADCKPT_AVX2_H

#include <immintrin.h>

#include "codec/format/group.h"
#include "codec/x86/kernels_avx2.h"

/* Every argument of type gck_format or gck_dtype below is a compile-time constant.  Without
 * inlining, the choice would be made for every vector. */
#define INLINE static inline __attribute__((always_inline))

/* 16 neighbours: x[0], x[2], .. x[14] and x[1], x[3], .. x[15].  The two halves of a
 * 32-bit word of bfloat16 are float32 after one instruction each, in this order. */
typedef struct {
    __m256 even, odd;
} v16;

/* Groups that share one computation of steps: a register holds 8 maxima. */
enum { BATCH = 8 };

/* The lower half of the sum with this holds an integer, rounded to nearest even. */
#define ROUNDER 0x1.8p23f

/* ---- memory ---- */

/* Non-temporal stores fault unless aligned, and callers guarantee less than that. */
INLINE int can_stream(const void *p, int streaming) { return streaming && ((uintptr_t)p & 31) == 0; }

#include "codec/x86/common_x86.h"

INLINE void store(void *p, __m256i v, int stream)
{
    if (stream) {
        _mm256_stream_si256((__m256i *)p, v);
    } else {
        _mm256_storeu_si256((__m256i *)p, v);
    }
}

/* How far ahead of its second pass a batch is prefetched, in bytes, when it has one stream: that pass
 * reads nothing new, and would leave the memory idle.  Measured on Zen 3: 2 KiB takes 1.6 times as
 * long, 16 KiB 1.1 times. */
enum { AHEAD = 8192 };

/* One core reads a fifth more from memory when its prefetchers follow several streams (Zen 3: with
 * stores, one stream reaches 0.82 of memcpy's bytes, four 1.03; two lie between, six are not
 * better; streams in neighbouring pages gain nothing). */
enum { STREAMS = 4, STREAM_NBYTES = 1 << 16 };

/* The first group of the batch to encode after that of group `first`: batches of STREAMS streams
 * take turns, as long as all of them have groups. */
INLINE int64_t batch_after(int64_t first, int64_t ngroups, gck_dtype dtype, int stream)
{
    const int64_t span = STREAM_NBYTES / ((dtype == GCK_F32 ? 4 : 2) * GCK_GROUP), all = STREAMS * span;
    const int64_t place = first % all;

    if (!stream || first - place + all > ngroups) {
        return first + BATCH;
    }
    if (place < all - span) {
        return first + span;
    }
    return place + BATCH < all ? first - (STREAMS - 1) * span + BATCH : first + BATCH;
}

/* How far ahead the next batch of a stream is. */
INLINE size_t ahead_of(size_t stride, int stream) { return stream ? BATCH * stride : AHEAD; }

/* ---- values ---- */

/* A constant in a register: gcc 12 rebuilds a visible constant for every use, three instructions
 * each time. */
INLINE __m256i kept(uint32_t lane)
{
    __m256i v = _mm256_set1_epi32((int)lane);
    __asm__("" : "+x"(v));
    return v;
}

INLINE __m256 kept_ps(float lane) { return _mm256_castsi256_ps(kept(gck_bits(lane))); }

/* Constants for the loads and maxima of a dtype; made once, before the loop over groups. */
typedef struct {
    __m256i abs;             /* all but the signs                                   */
    __m256i f16_fields;      /* float16 shifted right by 3: sign, exponent, fraction */
    __m256  f16_scale;
} load_constants;

INLINE load_constants constants_of(gck_dtype dtype)
{
    return (load_constants){kept(dtype == GCK_F32 ? 0x7FFFFFFFu : 0x7FFF7FFFu), kept(0x8FFFE000u), kept_ps(0x1p112f)};
}

/* float16 in the upper halves -> float32.  Inf and NaN become numbers above 65504. */
INLINE __m256 from_f16_upper(__m256i w, load_constants c)
{
    const __m256i moved = _mm256_and_si256(_mm256_srai_epi32(w, 3), c.f16_fields);
    return _mm256_mul_ps(_mm256_castsi256_ps(moved), c.f16_scale);
}

INLINE __m256i upper_halves(__m256i w) { return _mm256_blend_epi16(_mm256_setzero_si256(), w, 0xAA); }

/* Values 16 k .. 16 k + 15 of a group.  flip: bit 15 of a 16-bit lane negates. */
INLINE v16 load16(const char *group, gck_dtype dtype, int k, __m256i flip, load_constants c)
{
    if (dtype == GCK_F32) {
        const float *p = (const float *)group + 16 * k;
        const __m256 a = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 8), 1);
        const __m256 b = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 4)), _mm_loadu_ps(p + 12), 1);
        return (v16){_mm256_xor_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_castsi256_ps(_mm256_slli_epi32(flip, 16))),
                     _mm256_xor_ps(_mm256_shuffle_ps(a, b, 0xDD), _mm256_castsi256_ps(upper_halves(flip)))};
    }
    const __m256i w = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)group + k), flip);
    if (dtype == GCK_F16) {
        return (v16){from_f16_upper(_mm256_slli_epi32(w, 16), c), from_f16_upper(w, c)};
    }
    return (v16){_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), _mm256_castsi256_ps(upper_halves(w))};
}

/* |x| of a group, as integers that order like the values: 8 maxima in 32-bit lanes, a
 * 16-bit dtype in the upper halves. */
INLINE __m256i group_maxima(const char *group, gck_dtype dtype, load_constants c)
{
    const __m256i *p = (const __m256i *)group;
    __m256i max = _mm256_setzero_si256();

    if (dtype == GCK_F32) {
        for (int k = 0; k < 16; k++) {
            max = _mm256_max_epi32(max, _mm256_and_si256(_mm256_loadu_si256(p + k), c.abs));
        }
        return max;
    }
    for (int k = 0; k < 8; k++) {
        max = _mm256_max_epu16(max, _mm256_and_si256(_mm256_loadu_si256(p + k), c.abs));
    }
    max = _mm256_max_epu16(max, _mm256_slli_epi32(max, 16));
    return upper_halves(max);
}

/* Lane j of the result: the maximum of the lanes of m[j]. */
INLINE __m256i maxima_of_batch(const __m256i m[BATCH])
{
    __m256i two[4], four[2];

    for (int j = 0; j < 4; j++) {
        two[j] = _mm256_max_epi32(_mm256_unpacklo_epi32(m[2 * j], m[2 * j + 1]),
                                  _mm256_unpackhi_epi32(m[2 * j], m[2 * j + 1]));
    }
    for (int j = 0; j < 2; j++) {
        four[j] = _mm256_max_epi32(_mm256_unpacklo_epi64(two[2 * j], two[2 * j + 1]),
                                   _mm256_unpackhi_epi64(two[2 * j], two[2 * j + 1]));
    }
    return _mm256_max_epi32(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                            _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

/* group_maxima() of the first `left` groups, each in one lane. */
INLINE __m256i maxima_of_groups(const char *group, gck_dtype dtype, int64_t left, load_constants c)
{
    __m256i m[BATCH];

    if (left >= BATCH) {
        for (int j = 0; j < BATCH; j++) {
            m[j] = group_maxima(group + (size_t)j * group_nbytes(dtype), dtype, c);
        }
    } else {
        for (int j = 0; j < BATCH; j++) {
            m[j] = _mm256_setzero_si256();
        }
        for (int j = 0; j < left; j++) {
            m[j] = group_maxima(group + (size_t)j * group_nbytes(dtype), dtype, c);
        }
    }
    return maxima_of_batch(m);
}

/* Maxima as float32. */
INLINE __m256i as_floats(__m256i maxima, gck_dtype dtype, load_constants c)
{
    return dtype == GCK_F16 ? _mm256_castps_si256(from_f16_upper(maxima, c)) : maxima;
}

/* ---- steps ---- */

/* The parameters with which a batch of groups is quantised. */
typedef struct {
    _Alignas(32) float    multiplier[BATCH];   /* the result of gck_multiplier()          */
    _Alignas(16) uint16_t stored[BATCH];
    int                   odd;                 /* bit j: group j is not ordinary          */
} batch_steps;

/* amax: float32 bits; ordinary when GCK_TINY <= amax <= top. */
INLINE int odd_groups(__m256i amax, uint32_t top)
{
    const __m256i low = _mm256_cmpgt_epi32(_mm256_castps_si256(_mm256_set1_ps(GCK_TINY)), amax);
    const __m256i high = _mm256_cmpgt_epi32(amax, _mm256_set1_epi32((int)top));
    return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(low, high)));
}

/* The parameters without `odd`. */
INLINE batch_steps steps_of_batch(gck_format format, int noisy, __m256i amax)
{
    const int fp8 = format == GCK_E4M3 || format == GCK_E5M2;
    const float unit = format == GCK_E5M2 ? 0x1p-40f : gck_is_rotated(format) ? 0x1p-25f : 0x1p-32f;
    const uint32_t below = (1u << gck_dropped_bits(format, 0)) - 1u;
    const __m256i t = _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(amax),
                                                        _mm256_set1_ps(gck_step_factor(format, 0, noisy))));
    const __m256i carry = fp8 && !noisy
        ? _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), _mm256_and_si256(_mm256_srli_epi32(t, 16), _mm256_set1_epi32(1)))
        : _mm256_set1_epi32((int)below);
    const __m256i rounded = _mm256_and_si256(_mm256_add_epi32(t, carry), _mm256_set1_epi32((int)~below));
    const __m256i stored = _mm256_srli_epi32(rounded, 16);
    const __m256 step = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(stored, 16)), _mm256_set1_ps(unit));
    const __m256 inverse = _mm256_div_ps(_mm256_set1_ps(1.f), step);
    const __m256i packed = _mm256_packus_epi32(stored, stored);
    batch_steps s;

    _mm256_store_ps(s.multiplier, fp8 ? _mm256_mul_ps(inverse, _mm256_set1_ps(gck_fp8_shift(format))) : inverse);
    _mm_store_si128((__m128i *)s.stored, _mm_unpacklo_epi64(_mm256_castsi256_si128(packed),
                                                            _mm256_extracti128_si256(packed, 1)));
    s.odd = 0;
    return s;
}

/* The same from the first groups of `left`, which may be 0. */
INLINE batch_steps steps_of_groups(gck_format format, gck_dtype dtype, int noisy, const char *group, int64_t left,
                                   uint32_t top, load_constants c)
{
    const __m256i amax = as_floats(maxima_of_groups(group, dtype, left, c), dtype, c);
    batch_steps s = steps_of_batch(format, noisy, amax);

    s.odd = odd_groups(amax, top);
    return s;
}

/* ---- results ---- */

/* (2^16 + 1) v less its rounding error: v rounded to bfloat16, as float32, to nearest even.  Dekker
 * (1971) splits a number this way; that ties go to even is special to these 8 of 24 bits. v is 0 or
 * 2^-126 <= |v| < 2^111. */
#define SPLITTER 65537.f

typedef struct {
    __m256 splitter;                     /* bfloat16 */
    __m256 max, min;                     /* float16  */
} store_constants;

INLINE store_constants store_constants_of(void)
{
    return (store_constants){kept_ps(SPLITTER), kept_ps(65472.f), kept_ps(-65472.f)};
}

INLINE __m256 round_to_bf16(__m256 v, store_constants c)
{
    const __m256 p = _mm256_mul_ps(v, c.splitter);
    return _mm256_sub_ps(p, _mm256_sub_ps(p, v));
}

/* 16 words of values that are bfloat16. */
INLINE __m256i words_of_bf16(v16 v)
{
    return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(v.even), 16), _mm256_castps_si256(v.odd), 0xAA);
}

INLINE __m256i to_f16(v16 v, store_constants c)
{
    const __m128i even = _mm256_cvtps_ph(_mm256_max_ps(_mm256_min_ps(v.even, c.max), c.min), _MM_FROUND_TO_NEAREST_INT);
    const __m128i odd = _mm256_cvtps_ph(_mm256_max_ps(_mm256_min_ps(v.odd, c.max), c.min), _MM_FROUND_TO_NEAREST_INT);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(even, odd)),
                                   _mm_unpackhi_epi16(even, odd), 1);
}

/* The reverse of load16(), with the rounding of gck_store(); v must be as round_to_bf16()
 * requires. */
INLINE void store16(char *group, gck_dtype dtype, int k, v16 v, __m256i flip, store_constants c,
                    int stream)
{
    if (dtype == GCK_F32) {
        const __m256 even = _mm256_xor_ps(v.even, _mm256_castsi256_ps(_mm256_slli_epi32(flip, 16)));
        const __m256 odd = _mm256_xor_ps(v.odd, _mm256_castsi256_ps(upper_halves(flip)));
        const __m256i low = _mm256_castps_si256(_mm256_unpacklo_ps(even, odd));
        const __m256i high = _mm256_castps_si256(_mm256_unpackhi_ps(even, odd));
        store(group + 64 * k, _mm256_permute2x128_si256(low, high, 0x20), stream);
        store(group + 64 * k + 32, _mm256_permute2x128_si256(low, high, 0x31), stream);
        return;
    }
    const __m256i w = dtype == GCK_F16 ? to_f16(v, c)
        : words_of_bf16((v16){round_to_bf16(v.even, c), round_to_bf16(v.odd, c)});
    store(group + 32 * k, _mm256_xor_si256(w, flip), stream);
}

/* ---- vectors, for templates ---- */

typedef __m256i vec;

INLINE vec v_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void v_store(void *p, vec v, int stream) { store(p, v, stream); }

/* Constants are made once: see kept(). */
INLINE vec v_kept(uint32_t word) { return kept(word); }
INLINE vec v_all32(uint32_t word) { return _mm256_set1_epi32((int)word); }
INLINE vec v_all16(uint32_t word) { return _mm256_set1_epi16((short)word); }

INLINE vec v_and(vec a, vec b) { return _mm256_and_si256(a, b); }

/* By words: of 32 bits for float32, else of 16. */
INLINE vec v_add(vec a, vec b, gck_dtype d) { return d == GCK_F32 ? _mm256_add_epi32(a, b) : _mm256_add_epi16(a, b); }
INLINE vec v_max(vec a, vec b, gck_dtype d) { return d == GCK_F32 ? _mm256_max_epu32(a, b) : _mm256_max_epu16(a, b); }
INLINE vec v_shl(vec a, int n, gck_dtype d) { return d == GCK_F32 ? _mm256_slli_epi32(a, n) : _mm256_slli_epi16(a, n); }
INLINE vec v_shr(vec a, int n, gck_dtype d) { return d == GCK_F32 ? _mm256_srli_epi32(a, n) : _mm256_srli_epi16(a, n); }

#endif
