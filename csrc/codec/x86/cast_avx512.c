/* cast_avx512.c: bf16 and fp16 for AVX-512. */
#if defined(__x86_64__)
#include "codec/x86/avx512.h"
#include "codec/format/cast.h"
#include "codec/x86/prefetch.h"

/* 16 values, none NaN, none that overflows, in the lower halves of words. */
INLINE __m512i rounded(__m512i v, __m512i one, __m512i half)
{
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(v, 16), one);
    return _mm512_srli_epi32(_mm512_add_epi32(v, _mm512_add_epi32(half, odd)), 16);
}

/* Convert 32 values at a time.  Blocks that hold a value beyond the end, infinite or NaN go to the
 * reference. */
INLINE int narrow(gck_dtype dtype, gck_narrow *reference, const float *x, int64_t n, uint16_t *to, int stream)
{
    const __m512i abs = keep(all32(0x7FFFFFFFu)), end = keep(all32(gck_cast_end(dtype)));
    const __m512i one = keep(all32(1)), half = keep(all32(0x7FFF));
    int status = GCK_OK;
    int64_t i = 0;

    for (; i + 32 <= n; i += 32) {
        const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(x + i + 16);
        gck_ask_ahead(x + i, 128);
        const __m512i most = _mm512_max_epu32(_mm512_and_si512(a, abs), _mm512_and_si512(b, abs));
        if (_mm512_cmplt_epu32_mask(most, end) != 0xFFFF) {
            status |= reference(x + i, 32, to + i, 0);
            continue;
        }
        const __m256i low = dtype == GCK_F16
            ? _mm512_cvtps_ph(_mm512_castsi512_ps(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
            : _mm512_cvtepi32_epi16(rounded(a, one, half));
        const __m256i high = dtype == GCK_F16
            ? _mm512_cvtps_ph(_mm512_castsi512_ps(b), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
            : _mm512_cvtepi32_epi16(rounded(b, one, half));
        put(to + i, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), stream);
    }
    return status | reference(x + i, n - i, to + i, 0);
}

/* A NaN that is not quiet comes from a damaged payload, never from an encoder. */
INLINE __m512i quiet(__m512i v, __m512i abs, __m512i infinity, __m512i bit)
{
    return _mm512_mask_or_epi32(v, _mm512_cmplt_epu32_mask(infinity, _mm512_and_si512(v, abs)), v, bit);
}

INLINE void widen(gck_dtype dtype, gck_widen *reference, const uint16_t *from, int64_t n, float *x, int stream)
{
    const __m512i abs = keep(all32(0x7FFFFFFFu)), infinity = keep(all32(0x7F800000u)), bit = keep(all32(0x400000u));
    int64_t i = 0;

    for (; i + 16 <= n; i += 16) {
        const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(from + i));
        const __m512i v = dtype == GCK_F16
            ? _mm512_castps_si512(_mm512_cvtph_ps(half))
            : quiet(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16), abs, infinity, bit);
        put(x + i, v, stream);
    }
    reference(from + i, n - i, x + i, 0);
}

#define ISA avx512
#include "codec/x86/cast_kernels.h"

#else
typedef int gck_cast_avx512_is_empty;      /* ISO C requires a declaration in every file */
#endif
