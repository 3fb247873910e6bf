/* cast_avx2.c: bf16 and fp16 for AVX2. */
#if defined(__x86_64__)

#include "codec/x86/avx2.h"
#include "codec/format/cast.h"
#include "codec/x86/prefetch.h"

INLINE void store128(void *p, __m128i v, int stream)
{
    if (stream) {
        _mm_stream_si128(p, v);
    } else {
        _mm_storeu_si128(p, v);
    }
}

/* 16 values, none NaN, none that overflows. */
INLINE void put_bf16(uint16_t *to, __m256i a, __m256i b, int stream)
{
    const __m256i one = kept(1), half = kept(0x7FFF);
    const __m256i up_a = _mm256_add_epi32(half, _mm256_and_si256(_mm256_srli_epi32(a, 16), one));
    const __m256i up_b = _mm256_add_epi32(half, _mm256_and_si256(_mm256_srli_epi32(b, 16), one));
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_add_epi32(a, up_a), 16),
                                               _mm256_srli_epi32(_mm256_add_epi32(b, up_b), 16));
    store(to, _mm256_permute4x64_epi64(packed, 0xD8), stream);
}

INLINE void put_f16(uint16_t *to, __m256i a, __m256i b, int stream)
{
    store128(to, _mm256_cvtps_ph(_mm256_castsi256_ps(a), _MM_FROUND_TO_NEAREST_INT), stream);
    store128(to + 8, _mm256_cvtps_ph(_mm256_castsi256_ps(b), _MM_FROUND_TO_NEAREST_INT), stream);
}

/* Convert 64 values at a time.  Blocks that hold a value beyond the end, infinite or NaN go to the
 * reference. */
INLINE int narrow(gck_dtype dtype, gck_narrow *reference, const float *x, int64_t n, uint16_t *to, int stream)
{
    const __m256i abs = kept(0x7FFFFFFFu), last = kept(gck_cast_end(dtype) - 1);
    int status = GCK_OK;
    int64_t i = 0;

    for (; i + 64 <= n; i += 64) {
        __m256i v[8], most = _mm256_setzero_si256();
        gck_ask_ahead(x + i, sizeof v);
        for (int k = 0; k < 8; k++) {
            v[k] = _mm256_loadu_si256((const __m256i *)(x + i) + k);
            most = _mm256_max_epu32(most, _mm256_and_si256(v[k], abs));
        }
        if (_mm256_movemask_epi8(_mm256_cmpgt_epi32(most, last)) != 0) {
            status |= reference(x + i, 64, to + i, 0);
            continue;
        }
        for (int k = 0; k < 8; k += 2) {
            if (dtype == GCK_F16) {
                put_f16(to + i + 8 * k, v[k], v[k + 1], stream);
            } else {
                put_bf16(to + i + 8 * k, v[k], v[k + 1], stream);
            }
        }
    }
    return status | reference(x + i, n - i, to + i, 0);
}

/* A NaN that is not quiet comes from a damaged payload, never from an encoder. */
INLINE __m256i quiet(__m256i v)
{
    const __m256 f = _mm256_castsi256_ps(v);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
    return _mm256_or_si256(v, _mm256_and_si256(nan, kept(0x400000)));
}

INLINE void widen(gck_dtype dtype, gck_widen *reference, const uint16_t *from, int64_t n, float *x, int stream)
{
    int64_t i = 0;

    for (; i + 8 <= n; i += 8) {
        const __m128i half = _mm_loadu_si128((const __m128i *)(from + i));
        const __m256i v = dtype == GCK_F16 ? _mm256_castps_si256(_mm256_cvtph_ps(half))
                                           : quiet(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
        store(x + i, v, stream);
    }
    reference(from + i, n - i, x + i, 0);
}

#define ISA avx2
#include "codec/x86/cast_kernels.h"

#else
typedef int gck_cast_avx2_is_empty;      /* ISO C requires a declaration in every file */
#endif
