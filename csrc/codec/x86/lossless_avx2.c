/* lossless_avx2.c: lossless for AVX2: the vectors of lossless_vector.h. */
#if defined(__x86_64__)

#include "codec/x86/avx2.h"
#include "codec/portable/lossless_portable.h"

INLINE vec v_or(vec a, vec b) { return _mm256_or_si256(a, b); }
INLINE vec v_andnot(vec a, vec b) { return _mm256_andnot_si256(a, b); }

/* By words: of 32 bits for float32, else of 16. */
INLINE vec v_sub(vec a, vec b, gck_dtype d) { return d == GCK_F32 ? _mm256_sub_epi32(a, b) : _mm256_sub_epi16(a, b); }
INLINE vec v_min(vec a, vec b, gck_dtype d) { return d == GCK_F32 ? _mm256_min_epu32(a, b) : _mm256_min_epu16(a, b); }

INLINE vec v_subs16(vec a, vec b) { return _mm256_subs_epu16(a, b); }
INLINE vec v_subs8(vec a, vec b) { return _mm256_subs_epu8(a, b); }
INLINE vec v_add8(vec a, vec b) { return _mm256_add_epi8(a, b); }
INLINE vec v_min8(vec a, vec b) { return _mm256_min_epu8(a, b); }
INLINE vec v_eq8(vec a, vec b) { return _mm256_cmpeq_epi8(a, b); }
INLINE vec v_eq16(vec a, vec b) { return _mm256_cmpeq_epi16(a, b); }
INLINE uint64_t v_bytes(vec v) { return (uint32_t)_mm256_movemask_epi8(v); }

/* a + b where a is not 0, else 0. */
INLINE vec v_add8_unless_zero(vec a, vec b) { return v_andnot(v_eq8(a, v_all32(0)), v_add8(a, b)); }
INLINE vec v_add16_unless_zero(vec a, vec b) { return v_andnot(v_eq16(a, v_all32(0)), _mm256_add_epi16(a, b)); }

/* The upper 16 bits of the least word. */
INLINE uint32_t v_smallest(vec v, gck_dtype d)
{
    const __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
    const __m128i four = _mm_srli_epi32(_mm_min_epu32(low, high), 16);
    const __m128i words = d == GCK_F32 ? _mm_packus_epi32(four, four) : _mm_min_epu16(low, high);

    return (uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(words)) & 0xFFFFu;
}

INLINE uint32_t v_largest(vec v, gck_dtype d) { return v_smallest(_mm256_xor_si256(v, v_all32(~0u)), d) ^ 0xFFFFu; }

/* ---- float16: two rows of 16 bytes in a vector ---- */

/* The upper row in both, shifted left by 1 in the lower one. */
INLINE vec v_spread(vec v)
{
    const vec both = _mm256_permute4x64_epi64(v, 0xEE);
    return _mm256_blend_epi32(both, _mm256_add_epi16(both, both), 0x0F);
}

INLINE void v_store_rows(uint8_t *p, vec v, int rows, int stream)
{
    if (rows == 2 && !stream) {                    /* faster: one store */
        store(p, v, 0);
        return;
    }
    for (int r = 0; r < rows; r++) {
        const __m128i row = r == 0 ? _mm256_castsi256_si128(v) : _mm256_extracti128_si256(v, 1);
        if (stream) {
            _mm_stream_si128((__m128i *)p + r, row);
        } else {
            _mm_storeu_si128((__m128i *)p + r, row);
        }
    }
}

INLINE vec v_load_but_a_row(const void *p) { return _mm256_zextsi128_si256(_mm_loadu_si128(p)); }

/* The upper row is the bits of `pieces`: those of its upper row above those of its lower one. */
INLINE vec v_with_last_row(vec v, vec pieces)
{
    const __m128i high = _mm256_extracti128_si256(pieces, 1);
    return _mm256_inserti128_si256(v, _mm_or_si128(_mm256_castsi256_si128(pieces), _mm_add_epi16(high, high)), 1);
}

#define ISA avx2
#include "codec/x86/lossless_vector.h"

#else
typedef int gck_lossless_avx2_is_empty;  /* ISO C requires a declaration in every file */
#endif
