/* cast_avx2.c: bf16, fp16 and mask for AVX2: the kernels of cast_kernels.h. */
#if defined(__x86_64__)

#include "codec/x86/avx2.h"

INLINE int v_any_above(vec a, vec b) { return _mm256_movemask_epi8(_mm256_cmpgt_epi32(a, b)) != 0; }

/* Words to their lower halves, and back. */
INLINE vec v_to_words(vec a, vec b) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8); }
INLINE vec v_of_words(const void *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(p)); }

INLINE vec v_to_f16(vec a, vec b)
{
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm256_cvtps_ph(_mm256_castsi256_ps(a), _MM_FROUND_TO_NEAREST_INT)),
        _mm256_cvtps_ph(_mm256_castsi256_ps(b), _MM_FROUND_TO_NEAREST_INT), 1);
}

INLINE vec v_of_f16(const void *p) { return _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(p))); }

INLINE vec v_or_if_nan(vec v, vec bits)
{
    const __m256 f = _mm256_castsi256_ps(v);
    return _mm256_or_si256(v, _mm256_and_si256(_mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q)), bits));
}

INLINE uint64_t v_nonzero_bytes(vec v)
{
    return (uint32_t)~_mm256_movemask_epi8(_mm256_cmpeq_epi8(v, _mm256_setzero_si256()));
}

/* Repeat each byte of the bits eight times and keep one bit of it in each, as 0 or 1. */
INLINE vec v_bools(const void *p, vec one)
{
    const vec places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                        2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const vec bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    uint32_t bits;

    memcpy(&bits, p, sizeof bits);
    return _mm256_min_epu8(_mm256_and_si256(_mm256_shuffle_epi8(v_all32(bits), places), bit), one);
}

#define ISA avx2
#include "codec/x86/cast_kernels.h"

#else
typedef int gck_cast_avx2_is_empty;      /* ISO C requires a declaration in every file */
#endif
