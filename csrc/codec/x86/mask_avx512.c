/* mask_avx512.c: mask for AVX-512. */
#if defined(__x86_64__)
#include "codec/x86/avx512.h"

INLINE void pack(const uint8_t *x, int64_t ngroups, uint8_t *to, int stream)
{
    for (int64_t i = 0; i < 2 * ngroups; i++, x += 64, to += 8) {
        const __m512i v = _mm512_loadu_si512(x);
        const uint64_t bits = _mm512_test_epi8_mask(v, v);
        if (stream) {
            _mm_stream_si64((long long *)(void *)to, (long long)bits);
        } else {
            memcpy(to, &bits, sizeof bits);
        }
    }
}

void gck_avx512_mask_pack(const uint8_t *x, int64_t ngroups, uint8_t *to, int streaming)
{
    if (can_stream(to, streaming)) {
        pack(x, ngroups, to, 1);
        _mm_sfence();
    } else {
        pack(x, ngroups, to, 0);
    }
}

INLINE void unpack(const uint8_t *from, int64_t ngroups, uint8_t *x, int stream)
{
    const __m512i one = keep(all32(0x01010101u));

    for (int64_t i = 0; i < 2 * ngroups; i++, from += 8, x += 64) {
        uint64_t bits;
        memcpy(&bits, from, sizeof bits);
        put(x, _mm512_maskz_mov_epi8(bits, one), stream);
    }
}

void gck_avx512_mask_unpack(const uint8_t *from, int64_t ngroups, uint8_t *x, int streaming)
{
    if (can_stream(x, streaming)) {
        unpack(from, ngroups, x, 1);
        _mm_sfence();
    } else {
        unpack(from, ngroups, x, 0);
    }
}

#else
typedef int gck_mask_avx512_is_empty;      /* ISO C requires a declaration in every file */
#endif
