/* integer_avx512.h: float32 to integers, for the integer formats on AVX-512. */
#ifndef GRADCKPT_INTEGER_AVX512_H
#define GRADCKPT_INTEGER_AVX512_H

#include "codec/x86/avx512.h"

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

#endif
