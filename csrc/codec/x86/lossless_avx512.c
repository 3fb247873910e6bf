/* lossless_avx512.c: lossless for AVX-512: the vectors of lossless_vector.h. */
#if defined(__x86_64__)
#include "codec/x86/avx512.h"
#include "codec/portable/lossless_portable.h"

INLINE vec v_or(vec a, vec b) { return _mm512_or_si512(a, b); }
INLINE vec v_andnot(vec a, vec b) { return _mm512_andnot_si512(a, b); }

/* By words: of 32 bits for float32, else of 16. */
INLINE vec v_sub(vec a, vec b, gck_dtype d) { return d == GCK_F32 ? _mm512_sub_epi32(a, b) : _mm512_sub_epi16(a, b); }
INLINE vec v_min(vec a, vec b, gck_dtype d) { return d == GCK_F32 ? _mm512_min_epu32(a, b) : _mm512_min_epu16(a, b); }

INLINE vec v_add8(vec a, vec b) { return _mm512_add_epi8(a, b); }
INLINE vec v_subs16(vec a, vec b) { return _mm512_subs_epu16(a, b); }
INLINE vec v_subs8(vec a, vec b) { return _mm512_subs_epu8(a, b); }
INLINE vec v_min8(vec a, vec b) { return _mm512_min_epu8(a, b); }
INLINE vec v_eq8(vec a, vec b) { return _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(a, b)); }
INLINE vec v_eq16(vec a, vec b) { return _mm512_movm_epi16(_mm512_cmpeq_epi16_mask(a, b)); }
INLINE uint64_t v_bytes(vec v) { return _mm512_movepi8_mask(v); }

/* a + b where a is not 0, else 0. */
INLINE vec v_add8_unless_zero(vec a, vec b) { return _mm512_maskz_add_epi8(_mm512_test_epi8_mask(a, a), a, b); }
INLINE vec v_add16_unless_zero(vec a, vec b) { return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(a, a), a, b); }

/* The upper 16 bits of the largest word. */
INLINE uint32_t v_largest(vec v, gck_dtype d)
{
    return d == GCK_F32 ? largest_u32(v) >> 16 : largest_u16(v) & 0xFFFFu;
}

INLINE uint32_t v_smallest(vec v, gck_dtype d) { return v_largest(v_andnot(v, all32(~0u)), d) ^ 0xFFFFu; }

/* ---- float16: four rows of 16 bytes in a vector ---- */

/* The powers of two that shift row r left by r, and by 3 - r. */
#define ROW(power) power, power, power, power
TABLE uint32_t up_by_row[16] = {ROW(0x10001u), ROW(0x20002u), ROW(0x40004u), ROW(0x80008u)};
TABLE uint32_t down_by_row[16] = {ROW(0x80008u), ROW(0x40004u), ROW(0x20002u), ROW(0x10001u)};
#undef ROW

/* The last row in all, shifted left by 3 in the first one, 2 in the second .. */
INLINE vec v_spread(vec v)
{
    return _mm512_mullo_epi16(_mm512_shuffle_i64x2(v, v, 0xFF), _mm512_loadu_si512(down_by_row));
}

INLINE __m128i row_of(vec v, int r)
{
    return r == 0   ? _mm512_extracti32x4_epi32(v, 0)
           : r == 1 ? _mm512_extracti32x4_epi32(v, 1)
           : r == 2 ? _mm512_extracti32x4_epi32(v, 2)
                    : _mm512_extracti32x4_epi32(v, 3);
}

INLINE void v_store_rows(uint8_t *p, vec v, int rows, int stream)
{
    if (rows == 4 && !stream) {                    /* faster: one store */
        put(p, v, 0);
        return;
    }
    for (int r = 0; r < rows; r++) {
        if (stream) {
            _mm_stream_si128((__m128i *)(void *)p + r, row_of(v, r));
        } else {
            _mm_storeu_si128((__m128i *)(void *)p + r, row_of(v, r));
        }
    }
}

INLINE vec v_load_but_a_row(const void *p) { return _mm512_maskz_loadu_epi32(0x0FFF, p); }

/* The last row is the bits of `pieces`, row by row. */
INLINE vec v_with_last_row(vec v, vec pieces)
{
    const vec up = _mm512_mullo_epi16(pieces, _mm512_loadu_si512(up_by_row));
    const __m128i low = _mm_or_si128(row_of(up, 0), row_of(up, 1)), high = _mm_or_si128(row_of(up, 2), row_of(up, 3));
    return _mm512_inserti32x4(v, _mm_or_si128(low, high), 3);
}

#define ISA avx512
#include "codec/x86/lossless_vector.h"

#else
typedef int gck_lossless_avx512_is_empty;  /* ISO C requires a declaration in every file */
#endif
