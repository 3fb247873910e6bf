/* integer_avx2.h: float32 to integers and steps back, for the integer formats on AVX2. */
#ifndef GRADCKPT_INTEGER_AVX2_H
#define GRADCKPT_INTEGER_AVX2_H

#include "codec/x86/avx2.h"

/* 16 codes in 16-bit lanes.  The fused sum rounds the exact product, as
 * gck_round_product() does. */
INLINE __m256i quantised(v16 v, __m256 inverse, __m256 rounder)
{
    const __m256i even = _mm256_castps_si256(_mm256_fmadd_ps(v.even, inverse, rounder));
    const __m256i odd = _mm256_castps_si256(_mm256_fmadd_ps(v.odd, inverse, rounder));
    return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
}

/* The steps whose products with an integer are all normal: see round_to_bf16(). */
INLINE int step_is_ordinary(uint32_t stored) { return stored >= 0x1080u && stored < 0x7F80u; }

INLINE __m256 step_of(uint32_t stored)
{
    return _mm256_set1_ps(gck_float(stored << 16) * 0x1p-32f);
}

#endif
