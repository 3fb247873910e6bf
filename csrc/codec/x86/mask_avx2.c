/* mask_avx2.c: mask for AVX2. */
#if defined(__x86_64__)

#include "codec/x86/avx2.h"

INLINE uint64_t bits_of_32(const uint8_t *x)
{
    const __m256i zero = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)x), _mm256_setzero_si256());
    return (uint32_t)~_mm256_movemask_epi8(zero);
}

INLINE void pack(const uint8_t *x, int64_t ngroups, uint8_t *to, int stream)
{
    for (int64_t i = 0; i < 2 * ngroups; i++, x += 64, to += 8) {
        const uint64_t bits = bits_of_32(x) | bits_of_32(x + 32) << 32;
        if (stream) {
            _mm_stream_si64((long long *)to, (long long)bits);
        } else {
            memcpy(to, &bits, sizeof bits);
        }
    }
}

void gck_avx2_mask_pack(const uint8_t *x, int64_t ngroups, uint8_t *to, int streaming)
{
    STREAMED(pack, to, x, ngroups, to)
}

/* Repeat each byte of the bits eight times and keep one bit of it in each, as 0 or 1. */
INLINE void unpack(const uint8_t *from, int64_t ngroups, uint8_t *x, int stream)
{
    const __m256i places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    const __m256i one = _mm256_set1_epi8(1);

    for (int64_t i = 0; i < 4 * ngroups; i++, from += 4, x += 32) {
        uint32_t bits;
        memcpy(&bits, from, sizeof bits);
        const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), places);
        store(x, _mm256_min_epu8(_mm256_and_si256(spread, bit), one), stream);
    }
}

void gck_avx2_mask_unpack(const uint8_t *from, int64_t ngroups, uint8_t *x, int streaming)
{
    STREAMED(unpack, x, from, ngroups, x)
}

#else
typedef int gck_mask_avx2_is_empty;      /* ISO C requires a declaration in every file */
#endif
