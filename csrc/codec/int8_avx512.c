/* int8_avx512.c: int8 (rotated) and int8_plain on AVX-512. */
#if defined(__x86_64__)
#include "avx512.h"

/* ---- encode ---- */

/* gck_round_product() of 64 values, two pairs.  1.5 x 2^23 + product, rounded once by
 * the FMA, holds the integer in its low bits; ties go to even because the constant is. */
INLINE __m512i quantise(const constants *c, gck_dtype dtype, const __m512 y[4], __m512 inverse)
{
    __m512i q[4];

    for (int j = 0; j < 4; j++) {
        q[j] = _mm512_castps_si512(_mm512_fmadd_ps(y[j], inverse, c->magic));
    }
    q[0] = merge_lower(c, q[0], q[1]);
    q[2] = merge_lower(c, q[2], q[3]);
    return natural_bytes(_mm512_packs_epi16(q[0], q[2]), dtype);
}

INLINE void encode_plain(const constants *c, gck_dtype dtype, const void *x, float inverse,
                         uint8_t *codes, int stream)
{
    __m512 y[8];

    for (int k = 0; k < 4; k++) {
        load_pair(c, x, dtype, k, &y[2 * k], &y[2 * k + 1]);
    }
    put(codes, quantise(c, dtype, y, _mm512_set1_ps(inverse)), stream);
    put(codes + 64, quantise(c, dtype, y + 4, _mm512_set1_ps(inverse)), stream);
}

INLINE void encode_groups_plain(const constants *c, gck_dtype dtype, const void *x, int64_t ngroups,
                                uint8_t *codes, uint16_t *scales, int64_t index, int stream)
{
    tile t = {.ordinary = 0};

    for (int64_t first = 0; first < ngroups; first += TILE) {
        const char *xt = (const char *)x + (size_t)first * group_bytes(dtype);
        const int count = (int)(ngroups - first < TILE ? ngroups - first : TILE);

        for (int i = 0; i < count; i++) {
            t.amax[i] = abs_max_bits(c, xt + (size_t)i * group_bytes(dtype), dtype);
        }
        tile_scales(&t, GCK_INT8_PLAIN, dtype);
        for (int i = 0; i < count; i++) {
            const char *xg = xt + (size_t)i * group_bytes(dtype);
            uint8_t *cg = codes + (first + i) * GCK_GROUP;

            if (!(t.ordinary >> i & 1)) {
                scales[first + i] = encode_rare(GCK_INT8_PLAIN, xg, dtype, t.amax[i], index + first + i, cg);
                continue;
            }
            encode_plain(c, dtype, xg, t.multiplier[i], cg, stream);
            scales[first + i] = (uint16_t)t.stored[i];
        }
    }
}

/* ---- encode: rotation ---- */

/* The signs of 32 words. */
INLINE __m512i negated_words(uint32_t signs) { return _mm512_slli_epi16(_mm512_movm_epi16(signs), 15); }

/* d o v for natural register j of 16 float32. */
INLINE __m512 flip_natural(__m512 v, const uint32_t *signs, int j)
{
    const __mmask16 negated = (__mmask16)(signs[j / 2] >> (j % 2 * 16));
    const __m512i bits = _mm512_castps_si512(v);

    return _mm512_castsi512_ps(_mm512_mask_xor_epi32(bits, negated, bits, all32(0x80000000u)));
}

/* +1 where bit s of the lane's number is 0, else -1. */
TABLE float lane_signs[4][16] = {
    {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
    {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
    {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
    {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
};

INLINE void butterfly(__m512 *a, __m512 *b)
{
    const __m512 sum = _mm512_add_ps(*a, *b);

    *b = _mm512_sub_ps(*a, *b);
    *a = sum;
}

/* The four stages between lanes of one register.  The FMA multiplies by +-1, so that
 * it is the reference's one addition or subtraction. */
INLINE __m512 lane_stages(__m512 v)
{
    v = _mm512_fmadd_ps(v, table_ps(lane_signs[0]), _mm512_permute_ps(v, 0xB1));
    v = _mm512_fmadd_ps(v, table_ps(lane_signs[1]), _mm512_permute_ps(v, 0x4E));
    v = _mm512_fmadd_ps(v, table_ps(lane_signs[2]), _mm512_shuffle_f32x4(v, v, 0xB1));
    return _mm512_fmadd_ps(v, table_ps(lane_signs[3]), _mm512_shuffle_f32x4(v, v, 0x4E));
}

/* y = H (d o x), in pairs.  Index bit 0 is between lo and hi for bfloat16 (then come
 * the lanes, then the pairs); for others the lanes are first. */
INLINE void rotate(const constants *c, gck_dtype dtype, const void *x, const uint32_t *signs, __m512 y[8])
{
    for (int k = 0; k < 4; k++) {
        if (dtype == GCK_BF16) {
            const __m512i w = _mm512_loadu_si512((const char *)x + 64 * k);
            split_bf16(c, _mm512_xor_si512(w, negated_words(signs[k])), &y[2 * k], &y[2 * k + 1]);
            butterfly(&y[2 * k], &y[2 * k + 1]);
        } else {
            y[2 * k] = flip_natural(load16(x, dtype, 2 * k), signs, 2 * k);
            y[2 * k + 1] = flip_natural(load16(x, dtype, 2 * k + 1), signs, 2 * k + 1);
        }
        y[2 * k] = lane_stages(y[2 * k]);
        y[2 * k + 1] = lane_stages(y[2 * k + 1]);
        if (dtype != GCK_BF16) {
            butterfly(&y[2 * k], &y[2 * k + 1]);
        }
    }
    for (int j = 0; j < 2; j++) {
        butterfly(&y[j], &y[j + 2]);
        butterfly(&y[j + 4], &y[j + 6]);
    }
    for (int j = 0; j < 4; j++) {
        butterfly(&y[j], &y[j + 4]);
    }
}

/* Bits of max |y|; not finite if any y is not.  range_ps prefers a number to a NaN, so
 * it may see only the two results a + b, a - b of a last butterfly: if either of those
 * is not finite, then a or b is NaN and both are NaN; or one of them is Inf.  (With any
 * other two it could lose a NaN: stages can overflow to Inf and on to NaN in all of
 * some outputs while the others are small.)  Beyond, integers: NaN is largest. */
INLINE uint32_t rotated_max_bits(const __m512 y[8])
{
    __m512i max[4];

    for (int j = 0; j < 4; j++) {
        max[j] = _mm512_castps_si512(_mm512_range_ps(y[j], y[j + 4], 0x0B));   /* larger |.|, sign 0 */
    }
    return largest_u32(_mm512_max_epu32(_mm512_max_epu32(max[0], max[1]), _mm512_max_epu32(max[2], max[3])));
}

/* Is the group ordinary?  If every y is finite, no stage overflowed, and by Parseval
 * max |y| >= max |x| up to 7 roundings of sums of 128 values: 1 part in 10^4.  So below
 * 2^99 = 6.3e29 no x is beyond 1e30.  float16 escapes far below that: asked before. */
INLINE int ordinary_rotated(uint32_t amax)
{
    const uint32_t low = gck_bits(GCK_TINY);

    return amax - low < gck_bits(0x1p99f) - low;
}

INLINE int escapes_f16(const constants *c, const void *x)
{
    return _mm512_cmpgt_epu16_mask(abs_max_words(c, x), all16(0x7BFEu)) != 0;      /* 65472 */
}

/* y, and the bits of max |y|; ~0 if x is known to be no ordinary group. */
INLINE uint32_t rotate_and_measure(const constants *c, gck_dtype dtype, const void *x, int64_t index, __m512 y[8])
{
    rotate(c, dtype, x, gck_sign_words[gck_pattern(index)], y);
    return dtype == GCK_F16 && escapes_f16(c, x) ? ~0u : rotated_max_bits(y);
}

/* How many of 64 codes have different upper two bits. */
INLINE int count_large(__m512i t)
{
    const __m512i differ = _mm512_xor_si512(t, _mm512_slli_epi16(t, 1));   /* bit 7 of each byte */

    return __builtin_popcountll(_mm512_movepi8_mask(differ));
}

INLINE uint16_t encode_rotated(const constants *c, gck_dtype dtype, const void *x, const __m512 y[8],
                               uint32_t amax, int64_t index, uint8_t *codes, int stream)
{
    if (!ordinary_rotated(amax)) {
        return encode_rare(GCK_INT8, x, dtype, amax, index, codes);
    }
    const uint32_t stored = gck_stored(GCK_INT8, 0, 0, gck_float(amax));
    const __m512 inverse = _mm512_set1_ps(gck_inverse(GCK_INT8, 0, stored));
    const __m512i t0 = quantise(c, dtype, y, inverse), t1 = quantise(c, dtype, y + 4, inverse);
    put(codes, t0, stream);
    put(codes + 64, t1, stream);
    if (__builtin_expect(count_large(t0) + count_large(t1) >= GCK_MOST_LARGE, 0)) {
        return encode_rare(GCK_INT8, x, dtype, amax, index, codes);
    }
    return (uint16_t)stored;
}

/* Two groups at a time: the second is rotated while the scale of the first, a long
 * chain of scalar operations, is on its way. */
INLINE void encode_groups_rotated(const constants *c, gck_dtype dtype, const char *x, int64_t ngroups,
                                  uint8_t *codes, uint16_t *scales, int64_t index, int stream)
{
    const size_t stride = group_bytes(dtype);
    __m512 y0[8], y1[8];
    int64_t g = 0;

    for (; g + 2 <= ngroups; g += 2, x += 2 * stride, codes += 2 * GCK_GROUP) {
        const uint32_t amax0 = rotate_and_measure(c, dtype, x, index + g, y0);
        const uint32_t amax1 = rotate_and_measure(c, dtype, x + stride, index + g + 1, y1);
        scales[g] = encode_rotated(c, dtype, x, y0, amax0, index + g, codes, stream);
        scales[g + 1] = encode_rotated(c, dtype, x + stride, y1, amax1, index + g + 1, codes + GCK_GROUP, stream);
    }
    if (g < ngroups) {
        const uint32_t amax = rotate_and_measure(c, dtype, x, index + g, y0);
        scales[g] = encode_rotated(c, dtype, x, y0, amax, index + g, codes, stream);
    }
}

INLINE void encode_groups(gck_format format, gck_dtype dtype, const void *x, int64_t ngroups,
                          uint8_t *codes, uint16_t *scales, int64_t index, int streaming)
{
    const int stream = may_stream(codes, streaming);
    const constants c = make_constants(format, dtype);

    if (format == GCK_INT8_PLAIN) {
        encode_groups_plain(&c, dtype, x, ngroups, codes, scales, index, stream);
    } else {
        encode_groups_rotated(&c, dtype, x, ngroups, codes, scales, index, stream);
    }
    if (stream) {
        _mm_sfence();
    }
}

/* ---- decode ---- */

/* Codes 32 k .. 32 k + 31 to bfloat16.  No conversion: a byte placed at bit 15 of 256.0
 * makes 256 + (code ^ 0x80) = 384 + code, and (384 + code) * s - 384 * s by FMA is
 * code * s: that has 15 bits, so it is exact, and +0 for code 0. */
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

INLINE void decode_plain(const constants *c, gck_dtype dtype, const uint8_t *codes, uint32_t scale,
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

/* ---- decode: rotation ---- */

INLINE void butterfly16(__m512i *a, __m512i *b)
{
    const __m512i sum = _mm512_add_epi16(*a, *b);

    *b = _mm512_sub_epi16(*a, *b);
    *a = sum;
}

/* Exchange registers against lanes, so that the next stage is between a and b.  Position
 * bits as H code below numbers them: `near` turns (a|b, 1, 2) to (2, a|b, 1), `far`
 * (a|b, 3, 4) to (3, 4, a|b). */
INLINE void exchange_near(__m512i *a, __m512i *b)
{
    const __m512i lo = _mm512_unpacklo_epi32(*a, *b);

    *b = _mm512_unpackhi_epi32(*a, *b);
    *a = lo;
}

INLINE void exchange_far(__m512i *a, __m512i *b)
{
    const __m512i even = _mm512_shuffle_i64x2(*a, *b, 0x88);

    *b = _mm512_shuffle_i64x2(*a, *b, 0xDD);
    *a = even;
}

/* H code, in the pairs of bfloat16, as integers: |sums| <= 2^14, so 16 bits do, in any
 * order of stages.  What index bit each position holds:
 *                      byte   word's lane      registers
 *                              0  1 2 3 4
 *   loaded, shuffled     2     0  3 1 4 5      6
 *   maddubs                    0  3 1 4 5      2 6      stage 2; then 6
 *   near                       0  2 3 4 5      1 6      stage 1
 *   near                       0  1 2 4 5      3 6      stage 3
 *   far                        0  1 2 5 3      4 6      stage 4
 *   far                        0  1 2 3 4      5 6      stage 5
 *   madd                          1 2 3 4    0 5 6      stage 0 */
#define LANE_OF_BYTES 0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15
TABLE uint8_t unrotate_bytes[64] = {LANE_OF_BYTES, LANE_OF_BYTES, LANE_OF_BYTES, LANE_OF_BYTES};
#undef LANE_OF_BYTES

INLINE void unrotate(const constants *c, const uint8_t *codes, __m512i y[8])
{
    __m512i r[4];

    for (int h = 0; h < 2; h++) {
        const __m512i loaded = _mm512_loadu_si512(codes + 64 * h);
        const __m512i bytes = _mm512_shuffle_epi8(loaded, _mm512_loadu_si512(unrotate_bytes));
        r[2 * h] = _mm512_maddubs_epi16(c->plus_bytes, bytes);
        /* Its first operand is unsigned: 128 + code, and the offsets cancel. */
        r[2 * h + 1] = _mm512_maddubs_epi16(_mm512_xor_si512(bytes, c->sign_bytes), c->plus_minus_bytes);
    }
    butterfly16(&r[0], &r[2]);
    butterfly16(&r[1], &r[3]);
    for (int h = 0; h < 4; h += 2) {
        exchange_near(&r[h], &r[h + 1]);
        butterfly16(&r[h], &r[h + 1]);
        exchange_near(&r[h], &r[h + 1]);
        butterfly16(&r[h], &r[h + 1]);
        exchange_far(&r[h], &r[h + 1]);
        butterfly16(&r[h], &r[h + 1]);
        exchange_far(&r[h], &r[h + 1]);
        butterfly16(&r[h], &r[h + 1]);
    }
    for (int k = 0; k < 4; k++) {
        y[2 * k] = _mm512_madd_epi16(r[k], c->plus_words);
        y[2 * k + 1] = _mm512_madd_epi16(r[k], c->plus_minus_words);
    }
}

TABLE uint32_t first_of_pair[16] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
TABLE uint32_t last_of_pair[16] = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

/* Signs last: a zero y under a negative sign is -0. */
INLINE void decode_rotated(const constants *c, gck_dtype dtype, const uint8_t *codes, uint32_t scale,
                           const uint32_t *signs, void *x, int stream)
{
    const __m512 step = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_set1_epi32((int)(scale << 16))), c->step);
    __m512i y[8];

    unrotate(c, codes, y);
    for (int k = 0; k < 4; k++) {
        const __m512 even = _mm512_mul_ps(_mm512_cvtepi32_ps(y[2 * k]), step);
        const __m512 odd = _mm512_mul_ps(_mm512_cvtepi32_ps(y[2 * k + 1]), step);
        if (dtype == GCK_BF16) {
            put((char *)x + 64 * k, _mm512_xor_si512(to_bf16(c, even, odd), negated_words(signs[k])), stream);
        } else {
            const __m512 lo = _mm512_permutex2var_ps(even, _mm512_loadu_si512(first_of_pair), odd);
            const __m512 hi = _mm512_permutex2var_ps(even, _mm512_loadu_si512(last_of_pair), odd);
            put_pair(c, x, dtype, k, flip_natural(lo, signs, 2 * k), flip_natural(hi, signs, 2 * k + 1), stream);
        }
    }
}

/* Any scale that is a number, for the rotated: its step is rounded as in the reference.
 * The plain one multiplies once where the reference does twice: the same if the step is
 * normal, from biased exponent 33 of the stored scale on. */
INLINE int ordinary_scale(gck_format format, uint32_t scale)
{
    const uint32_t low = (format == GCK_INT8 ? 0u : 33u) << 7;

    return scale - low < (255u << 7) - low;
}

INLINE void decode_groups(gck_format format, gck_dtype dtype, const uint8_t *codes, const uint16_t *scales,
                          int64_t ngroups, void *x, int64_t index, int streaming)
{
    const int stream = may_stream(x, streaming);
    const constants c = make_constants(format, dtype);

    for (int64_t g = 0; g < ngroups; g++) {
        char *xg = (char *)x + (size_t)g * group_bytes(dtype);

        if (!ordinary_scale(format, scales[g])) {
            decode_rare(format, codes + g * GCK_GROUP, scales[g], index + g, xg, dtype);
        } else if (format == GCK_INT8) {
            decode_rotated(&c, dtype, codes + g * GCK_GROUP, scales[g], gck_sign_words[gck_pattern(index + g)], xg, stream);
        } else {
            decode_plain(&c, dtype, codes + g * GCK_GROUP, scales[g], xg, stream);
        }
    }
    if (stream) {
        _mm_sfence();
    }
}

GCK_AVX512_DTYPES(GCK_AVX512_BODY, GCK_INT8)
GCK_AVX512_DTYPES(GCK_AVX512_BODY, GCK_INT8_PLAIN)

#else
typedef int gck_int8_avx512_is_empty;       /* C wants something in every file */
#endif
