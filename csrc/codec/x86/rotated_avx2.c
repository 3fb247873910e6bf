/* rotated_avx2.c: int8, int6 and int4 for AVX2. */
#if defined(__x86_64__)

#include "codec/x86/doubt_avx2.h"
#include "codec/x86/rotate_avx2.h"
#include "codec/x86/rounding_avx2.h"

/* ---- encode ---- */

/* y, the even values first, to integers as codebook_avx2.h wants them. */
INLINE void integers_of(const __m256 y[16], float multiplier, __m256 rounder, __m256i t[4])
{
    const __m256 inverse = _mm256_set1_ps(multiplier);

    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_packs_epi16(quantised((v16){y[2 * i], y[2 * i + 8]}, inverse, rounder),
                                  quantised((v16){y[2 * i + 1], y[2 * i + 9]}, inverse, rounder));
    }
}

/* How many of 128 have different upper two bits. */
INLINE int count_large(const __m256i t[4])
{
    int n = 0;

    for (int i = 0; i < 4; i++) {
        const __m256i differ = _mm256_xor_si256(t[i], _mm256_add_epi8(t[i], t[i]));
        n += __builtin_popcount((uint32_t)_mm256_movemask_epi8(differ));
    }
    return n;
}

/* Write the codes of t; returns the side word. */
INLINE int put_group(gck_format format, const __m256i t[4], uint16_t stored, uint8_t *out, int stream)
{
    if (format == GCK_INT6) {
        const int uniform = count_large(t) > GCK_MANY_LARGE;
        if (uniform) {
            pack_int6(t, 1, out, stream);
        } else {
            pack_int6(t, 0, out, stream);
        }
        return stored | uniform;
    }
    for (int i = 0; i < 4; i++) {
        store(out + 32 * i, _mm256_permute4x64_epi64(t[i], 0xD8), stream);
    }
    return stored;
}

/* ---- encode: stochastically ---- */

INLINE void noisy_levels(gck_format format, int uniform, const __m256 p[16], const __m256i noise[8], __m256i code[4])
{
    for (int i = 0; i < 4; i++) {
        const v16 a = {p[2 * i], p[2 * i + 8]}, b = {p[2 * i + 1], p[2 * i + 9]};
        code[i] = noisy_codes(format, uniform, a, b, noise[2 * i], noise[2 * i + 1]);
    }
}

INLINE void put_noisy_int8(const __m256 p[16], const __m256i noise[8], uint8_t *out)
{
    for (int i = 0; i < 4; i++) {
        const __m256i t = noisy_bytes(rounded_noisy((v16){p[2 * i], p[2 * i + 8]}, noise[2 * i]),
                                      rounded_noisy((v16){p[2 * i + 1], p[2 * i + 9]}, noise[2 * i + 1]));
        store(out + 32 * i, _mm256_permute4x64_epi64(t, 0xD8), 0);
    }
}

/* As put_group(), from y and the step's inverse. */
INLINE int put_noisy_group(gck_format format, const __m256 y[16], float multiplier, uint16_t stored,
                           const __m256i noise[8], uint8_t *out)
{
    const __m256 inverse = _mm256_set1_ps(multiplier);
    __m256 p[16];
    __m256i code[4];

    for (int k = 0; k < 16; k++) {
        p[k] = _mm256_mul_ps(y[k], inverse);
    }
    if (format == GCK_INT8) {
        put_noisy_int8(p, noise, out);
        return stored;
    }
    if (format == GCK_INT4) {
        noisy_levels(format, 0, p, noise, code);
        for (int i = 0; i < 4; i += 2) {
            store(out + 16 * i, packed_nibbles(raised(code[i]), raised(code[i + 1])), 0);
        }
        return stored;
    }
    const int uniform = count_large_noisy(p) > GCK_MANY_LARGE;
    if (uniform) {
        noisy_levels(format, 1, p, noise, code);
    } else {
        noisy_levels(format, 0, p, noise, code);
    }
    put_int6(code, out, 0);
    return stored | uniform;
}

/* ---- encode: groups ---- */

/* Encode int8 and int6.  dither: NULL rounds to nearest. */
INLINE void encode(gck_format format, gck_dtype dtype, const void *x, int64_t ngroups, uint8_t *codes,
                   uint16_t *scales, int64_t index, const gck_dither *dither, encode_unusual *unusual, int stream)
{
    const size_t stride = group_nbytes(dtype);
    const load_constants c = constants_of(dtype);
    const __m256 rounder = kept_ps(ROUNDER);
    const __m256i abs = kept(0x7FFFFFFFu);
    const philox p = philox_of(dither);
    __m256i maxima[BATCH] = {0}, noise[8];
    __m256 y[BATCH][16];

    for (int64_t first = 0; first < ngroups; first += BATCH) {
        const int n = ngroups - first < BATCH ? (int)(ngroups - first) : BATCH;
        const char *group = (const char *)x + (size_t)first * stride;

        const batch_signs values = signs_of_batch(group, dtype, n);
        for (int j = 0; j < n; j++) {
            rotate_in_lanes(group + (size_t)j * stride, dtype, signs_of(index + first + j), y[j], c);
        }
        for (int j = 0; j < n; j++) {
            maxima[j] = rotate_between(y[j], abs);
        }
        const __m256i amax = maxima_of_batch(maxima);
        const batch_steps s = steps_of_batch(format, dither != NULL, amax);
        const int odd = odd_groups(amax, 0x7F7FFFFFu), doubtful = doubtful_groups(group, dtype, n, &values, amax, c);
        _Alignas(32) float size[BATCH];
        _mm256_store_ps(size, _mm256_castsi256_ps(amax));
        for (int j = 0; j < n; j++, group += stride) {
            uint8_t *out = codes + (first + j) * gck_code_bytes(format);
            __m256i t[4];
            prefetch(group, stride, AHEAD);
            if ((odd | doubtful) >> j & 1
                && unusual(group, odd >> j & 1 ? 0.f : size[j], index + first + j, dither, out, scales + first + j)) {
                continue;
            }
            if (dither != NULL) {
                noise_of_group(&p, index + first + j, noise);
                scales[first + j] = (uint16_t)put_noisy_group(format, y[j], s.multiplier[j], s.stored[j], noise, out);
            } else {
                integers_of(y[j], s.multiplier[j], rounder, t);
                scales[first + j] = (uint16_t)put_group(format, t, s.stored[j], out, stream);
            }
        }
    }
}

/* ---- encode: int4 ---- */

/* The words that a batch of int4 stores beside the codes. */
typedef struct {
    int              at[BATCH];
    uint16_t         outlier[BATCH];
    _Alignas(16) uint16_t least[BATCH];  /* the step that field 1 stands for, as stored */
} batch_outliers;

/* The first value whose bits without the sign are `largest`, as group_maxima() gives them. */
INLINE int first_equal(const char *group, gck_dtype dtype, uint32_t largest, load_constants c)
{
    const __m256i *p = (const __m256i *)group;
    const __m256i key = dtype == GCK_F32 ? _mm256_set1_epi32((int)largest) : _mm256_set1_epi16((short)(largest >> 16));
    uint64_t equal[2] = {0, 0};

    if (dtype == GCK_F32) {
        for (int k = 0; k < 16; k++) {
            const __m256i e = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_loadu_si256(p + k), c.abs), key);
            equal[k / 8] |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(e)) << (8 * (k % 8));
        }
    } else {
        for (int k = 0; k < 8; k += 2) {
            const __m256i a = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_loadu_si256(p + k), c.abs), key);
            const __m256i b = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_loadu_si256(p + k + 1), c.abs), key);
            const __m256i e = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8);
            equal[k / 4] |= (uint64_t)(uint32_t)_mm256_movemask_epi8(e) << (16 * (k % 4));
        }
    }
    return equal[0] ? __builtin_ctzll(equal[0]) : 64 + __builtin_ctzll(equal[1]);
}

/* Take the outliers out of n groups: copy the groups to `rest` with zeros there.  largest: the
 * maxima of the groups; the values that count are finite.  noise: of the groups, or NULL. */
INLINE void take_outliers(const char *group, gck_dtype dtype, int n, const uint32_t largest[BATCH],
                          const __m256i (*noise)[8], load_constants c, char *rest, batch_outliers *o)
{
    const size_t stride = group_nbytes(dtype), item = stride / GCK_GROUP;

    for (int j = 0; j < n; j++, group += stride, rest += stride) {
        const int at = first_equal(group, dtype, largest[j], c);
        uint16_t bits = 0;
        if (noise != NULL) {
            memcpy(&bits, (const char *)noise[j] + 2 * at, sizeof bits);
        }
        const uint32_t outlier = dtype == GCK_BF16
            ? ((const uint16_t *)group)[at]
            : gck_int4_outlier(gck_load(group, dtype, at), noise != NULL ? bits : GCK_NEAREST);
        o->at[j] = at;
        o->outlier[j] = (uint16_t)outlier;
        o->least[j] = (uint16_t)(gck_int4_low(outlier) << 3);
        memcpy(rest, group, stride);
        memset(rest + (size_t)at * item, 0, item);
    }
}

/* Bit j: the step of group j is too small for a field, or zero. */
INLINE int beyond_fields(batch_steps s, const uint16_t least[BATCH])
{
    const __m128i stored = _mm_load_si128((const __m128i *)s.stored);
    const __m128i enough = _mm_cmpeq_epi16(_mm_max_epu16(stored, _mm_load_si128((const __m128i *)least)), stored);
    const __m128i some = _mm_andnot_si128(_mm_cmpeq_epi16(stored, _mm_setzero_si128()), enough);
    return ~_mm_movemask_epi8(_mm_packs_epi16(some, some)) & 0xFF;
}

INLINE void encode_int4(gck_format format, gck_dtype dtype, const void *x, int64_t ngroups, uint8_t *codes,
                        uint16_t *side, int64_t index, const gck_dither *dither, encode_unusual *unusual, int stream)
{
    const size_t stride = group_nbytes(dtype);
    const load_constants c = constants_of(dtype);
    const __m256 rounder = kept_ps(ROUNDER);
    const __m256i abs = kept(0x7FFFFFFFu);
    _Alignas(32) uint32_t largest[BATCH];
    _Alignas(32) char rest[BATCH * GCK_GROUP * 4];
    const philox p = philox_of(dither);
    batch_outliers o = {.least = {0}};
    __m256i maxima[BATCH] = {0}, noise[BATCH][8];
    __m256 y[BATCH][16];

    for (int64_t first = 0; first < ngroups; first += BATCH) {
        const int n = ngroups - first < BATCH ? (int)(ngroups - first) : BATCH;
        const char *group = (const char *)x + (size_t)first * stride;
        const batch_signs values = signs_of_batch(group, dtype, n);
        const __m256i raw = _mm256_max_epi32(values.high, values.low);
        int odd = odd_groups(as_floats(raw, dtype, c), gck_limit(dtype));

        _mm256_store_si256((__m256i *)largest, raw);
        for (int j = 0; dither != NULL && j < n; j++) {
            noise_of_group(&p, index + first + j, noise[j]);
        }
        take_outliers(group, dtype, n, largest, dither != NULL ? noise : NULL, c, rest, &o);
        for (int j = 0; j < n; j++) {
            rotate_in_lanes(rest + (size_t)j * stride, dtype, signs_of(index + first + j), y[j], c);
        }
        for (int j = 0; j < n; j++) {
            maxima[j] = rotate_between(y[j], abs);
        }
        const __m256i amax = maxima_of_batch(maxima);
        const batch_steps s = steps_of_batch(format, dither != NULL, amax);
        odd |= odd_groups(amax, 0x7F7FFFFFu) | beyond_fields(s, o.least);
        const int doubtful = doubtful_groups(group, dtype, n, &values, amax, c);
        _Alignas(32) float size[BATCH];
        _mm256_store_ps(size, _mm256_castsi256_ps(amax));
        for (int j = 0; j < n; j++, group += stride) {
            uint8_t *out = codes + (first + j) * gck_code_bytes(format);
            uint16_t *words = side + 2 * (first + j);
            __m256i t[4];
            prefetch(group, stride, AHEAD);
            if ((odd | doubtful) >> j & 1
                && unusual(group, odd >> j & 1 ? 0.f : size[j], index + first + j, dither, out, words)) {
                continue;
            }
            if (dither != NULL) {
                put_noisy_group(format, y[j], s.multiplier[j], s.stored[j], noise[j], out);
            } else {
                integers_of(y[j], s.multiplier[j], rounder, t);
                pack_int4(t, out, stream);
            }
            words[0] = (uint16_t)(o.at[j] << 9 | (((s.stored[j] - o.least[j]) >> 3) + 1));
            words[1] = o.outlier[j];
        }
    }
}

/* ---- decode ---- */

/* H code, in 16-bit lanes: w[k] holds values 16 k .. 16 k + 15, before the stage of bit 0. */
INLINE void sums_of_group(gck_format format, const uint8_t *codes, int uniform, __m256i w[8])
{
    __m256i value[4];

    if (format == GCK_INT8) {
        int8_values(codes, value);
        unrotate(value, w);
        return;
    }
    if (format == GCK_INT4) {
        int4_values(codes, value);
    } else if (uniform) {
        int6_values(codes, 1, value);
    } else {
        int6_values(codes, 0, value);
    }
    unrotate(value, w);
    for (int k = 0; k < 8; k += 4) {     /* bit 4 of the index is bit 1 of k, bit 5 is bit 0 */
        const __m256i swapped = w[k + 1];
        w[k + 1] = w[k + 2];
        w[k + 2] = swapped;
    }
    /* 128 halves: 64 at value 0, 32 in each of the words whose sum it is. */
    w[0] = _mm256_add_epi16(w[0], _mm256_setr_epi32(0x00200020, 0, 0, 0, 0, 0, 0, 0));
}

/* The step of an ordinary group as stored, 0 for others. */
INLINE uint32_t ordinary_step(gck_format format, const uint8_t *codes, const uint16_t *side)
{
    uint32_t stored = side[0];

    if (format == GCK_INT6) {
        stored &= ~1u;
    }
    if (format == GCK_INT4) {
        if ((side[1] & GCK_INT4_UNUSUAL) == GCK_INT4_UNUSUAL) {
            return ~0u;
        }
        stored = gck_int4_stored(side[0] & 511u, side[1]);
    }
    return step_is_ordinary(stored) || is_zero_group(format, codes, stored) ? stored : ~0u;
}

/* Sum x step, rounded to bfloat16 as round_to_bf16() rounds; up: step x SPLITTER, exact. */
INLINE __m256 bf16_product(__m256 sum, __m256 step, __m256 up)
{
    const __m256 p = _mm256_mul_ps(sum, up);
    return _mm256_sub_ps(p, _mm256_fnmadd_ps(sum, step, p));
}

INLINE void put_sums(gck_dtype dtype, const __m256i w[8], uint32_t stored, const __m256i *signs, char *group,
                     store_constants c, int stream)
{
    const __m256i plus = kept(0x00010001u), plus_minus = kept(0xFFFF0001u);
    const __m256 step = step_of(stored), up = _mm256_mul_ps(step, c.splitter);

    for (int k = 0; k < 8; k++) {                                       /* bit 0, and to 32 bits */
        const __m256 even = _mm256_cvtepi32_ps(_mm256_madd_epi16(w[k], plus));
        const __m256 odd = _mm256_cvtepi32_ps(_mm256_madd_epi16(w[k], plus_minus));
        const __m256i flip = _mm256_load_si256(signs + k);
        if (dtype == GCK_BF16) {
            const v16 v = {bf16_product(even, step, up), bf16_product(odd, step, up)};
            store(group + 32 * k, _mm256_xor_si256(words_of_bf16(v), flip), stream);
        } else {
            store16(group, dtype, k, (v16){_mm256_mul_ps(even, step), _mm256_mul_ps(odd, step)}, flip, c, stream);
        }
    }
}

INLINE void copy_group(char *to, const char *from, gck_dtype dtype, int stream)
{
    for (size_t at = 0; at < group_nbytes(dtype); at += 32) {
        store(to + at, _mm256_loadu_si256((const __m256i *)(from + at)), stream);
    }
}

/* One group ahead: while a group is multiplied and stored, the next one is summed.
 *
 * int4's outlier is written over the value in its place, except in memory that is written past the
 * caches: there a group goes through a buffer, one group later, when the stores are done. */
INLINE void decode(gck_format format, gck_dtype dtype, const uint8_t *codes, const uint16_t *side, int64_t ngroups,
                   void *x, int64_t index, decode_unusual *unusual, int stream)
{
    const size_t stride = group_nbytes(dtype), ncodes = gck_code_bytes(format), words = gck_side_words(format);
    const int late = format == GCK_INT4 && stream;
    const store_constants c = store_constants_of();
    _Alignas(32) char held[2][GCK_GROUP * 4];
    __m256i w[2][8];
    char *group = x;

    if (ngroups > 0) {
        sums_of_group(format, codes, side[0] & 1, w[0]);
    }
    for (int64_t g = 0; g < ngroups; g++, codes += ncodes, side += words, group += stride) {
        const uint32_t stored = ordinary_step(format, codes, side);
        const int more = g + 1 < ngroups;
        char *to = late ? held[g & 1] : group;
        sums_of_group(format, codes + (more ? ncodes : 0), side[more ? words : 0] & 1, w[~g & 1]);
        if (stored == ~0u) {
            unusual(codes, side, index + g, to);
        } else {
            put_sums(dtype, w[g & 1], stored, signs_of(index + g), to, c, stream && !late);
            if (format == GCK_INT4) {
                gck_store(to, dtype, side[0] >> 9, gck_float((uint32_t)side[1] << 16));
            }
        }
        if (late && g > 0) {
            copy_group(group - stride, held[~g & 1], dtype, stream);
        }
    }
    if (late && ngroups > 0) {
        copy_group(group - stride, held[~ngroups & 1], dtype, stream);
    }
}

X86_DTYPES(avx2, GCK_INT8, encode, decode)
X86_DTYPES(avx2, GCK_INT6, encode, decode)
X86_DTYPES(avx2, GCK_INT4, encode_int4, decode)

#else
typedef int gck_rotated_avx2_is_empty;   /* ISO C requires a declaration in every file */
#endif
