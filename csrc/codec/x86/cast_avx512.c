/* cast_avx512.c: bf16, fp16 and mask for AVX-512: the kernels of cast_kernels.h. */
#if defined(__x86_64__)

#include "codec/x86/avx512.h"

INLINE int v_any_above(vec a, vec b) { return _mm512_cmplt_epu32_mask(b, a) != 0; }

INLINE vec v_of_halves(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

/* Words to their lower halves, and back. */
INLINE vec v_to_words(vec a, vec b) { return v_of_halves(_mm512_cvtepi32_epi16(a), _mm512_cvtepi32_epi16(b)); }
INLINE vec v_of_words(const void *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }

INLINE vec v_to_f16(vec a, vec b)
{
    return v_of_halves(_mm512_cvtps_ph(_mm512_castsi512_ps(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                       _mm512_cvtps_ph(_mm512_castsi512_ps(b), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE vec v_of_f16(const void *p) { return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256(p))); }

INLINE vec v_or_if_nan(vec v, vec bits)
{
    const __m512 f = _mm512_castsi512_ps(v);
    return _mm512_mask_or_epi32(v, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), v, bits);
}

INLINE uint64_t v_nonzero_bytes(vec v) { return _mm512_test_epi8_mask(v, v); }

INLINE vec v_bools(const void *p, vec one)
{
    uint64_t bits;

    memcpy(&bits, p, sizeof bits);
    return _mm512_maskz_mov_epi8(bits, one);
}

#define ISA avx512
#include "codec/x86/cast_kernels.h"

#else
typedef int gck_cast_avx512_is_empty;      /* ISO C requires a declaration in every file */
#endif
