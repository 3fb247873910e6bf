/* nonzeros_portable.c: the kernels of sparse.h in portable C.
 *
 * Bitmaps by words of 64 bits; every x86-64 has SSE2, which is three times as fast, and as fast as memory.
 * Counts are loops that compilers make vectors of. */
#include "codec/portable/nonzeros_portable.h"

#include "codec/portable/kernels_portable.h"

#if defined(__SSE2__)
#include <emmintrin.h>

static inline __m128i zeros_of(const void *values, int i, gck_dtype dtype, int unsigned_zeros)
{
    const __m128i loaded = _mm_loadu_si128((const __m128i *)values + i), zero = _mm_setzero_si128();
    const __m128i v = !unsigned_zeros ? loaded
                    : dtype == GCK_F32 ? _mm_slli_epi32(loaded, 1) : _mm_slli_epi16(loaded, 1);

    return dtype == GCK_F32 ? _mm_cmpeq_epi32(v, zero) : _mm_cmpeq_epi16(v, zero);
}

uint64_t gck_nonzeros_of(const void *values, gck_dtype dtype, int unsigned_zeros)
{
    const int each = dtype == GCK_F32 ? 4 : 2;
    uint64_t zeros = 0;
    __m128i v[4];

    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < each; k++) {
            v[k] = zeros_of(values, each * i + k, dtype, unsigned_zeros);
        }
        const __m128i words = each == 2 ? _mm_packs_epi16(v[0], v[1])
                                        : _mm_packs_epi16(_mm_packs_epi32(v[0], v[1]), _mm_packs_epi32(v[2], v[3]));
        zeros |= (uint64_t)(uint32_t)_mm_movemask_epi8(words) << (16 * i);
    }
    return ~zeros;
}

#else

/* The sign bits of the words in w that are not zero: two words of 32 bits, or four of 16. */
static inline uint64_t signs_of_nonzeros(uint64_t w, uint64_t rest, int unsigned_zeros)
{
    return (((w & rest) + rest) | (unsigned_zeros ? 0 : w)) & ~rest;
}

uint64_t gck_nonzeros_of(const void *values, gck_dtype dtype, int unsigned_zeros)
{
    const uint64_t rest = dtype == GCK_F32 ? 0x7FFFFFFF7FFFFFFFu : 0x7FFF7FFF7FFF7FFFu;
    const int each = dtype == GCK_F32 ? 2 : 4;
    const char *at = values;
    uint64_t bits = 0, w;

    for (int i = 0; i < GCK_RUN; i += each, at += sizeof w) {
        memcpy(&w, at, sizeof w);
        w = signs_of_nonzeros(w, rest, unsigned_zeros);
        bits |= (dtype == GCK_F32 ? (w >> 31 & 1u) | w >> 62
                                  : (w >> 15) * 0x0001000200040008u >> 48 & 15u) << i;   /* bits side by side */
    }
    return bits;
}

#endif

int64_t gck_count_words(const void *values, int64_t count, gck_dtype dtype, int unsigned_zeros)
{
    const uint32_t *words = values, mask = unsigned_zeros ? 0x7FFFFFFFu : ~0u;
    const uint16_t *halves = values, half_mask = unsigned_zeros ? 0x7FFFu : 0xFFFFu;
    uint32_t zeros = 0;
    uint16_t half_zeros = 0;                                   /* up to 4096: in lanes of 16 bits */

    if (dtype == GCK_F32) {
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            zeros += (words[i] & mask) == 0;
        }
        return count - zeros;
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        half_zeros = (uint16_t)(half_zeros + ((halves[i] & half_mask) == 0));
    }
    return count - half_zeros;
}

/* ---- kernels ---- */

static int64_t pack(const void *x, gck_dtype dtype, int64_t runs, uint8_t *bitmap, void *to, int64_t room)
{
    const size_t item = gck_itemsize(dtype);
    const char *values = x;
    int64_t at = 0;

    for (int64_t i = 0; i < runs; i++, values += GCK_RUN * item) {
        const uint64_t bits = gck_nonzeros_of(values, dtype, 0);
        const int count = gck_popcount(bits);
        if (count > room - at) {
            return -1;
        }
        memcpy(bitmap + i * (int64_t)sizeof bits, &bits, sizeof bits);
        gck_pack_run(values, item, bits, (char *)to + (size_t)at * item);
        at += count;
    }
    return at;
}

static void unpack(const uint8_t *bitmap, const void *from, int64_t runs, gck_dtype dtype, void *x)
{
    const size_t item = gck_itemsize(dtype);
    const char *packed = from;
    char *values = x;
    uint64_t bits;

    for (int64_t i = 0; i < runs; i++, values += GCK_RUN * item) {
        memcpy(&bits, bitmap + i * (int64_t)sizeof bits, sizeof bits);
        gck_unpack_run(packed, item, bits, values);
        packed += (size_t)gck_popcount(bits) * item;
    }
}

#define DEFINE(bits, dtype)                                                                                       \
    int64_t gck_portable_pack_nonzeros##bits(const void *x, int64_t runs, uint8_t *bitmap, void *to, int64_t room) \
    {                                                                                                             \
        return pack(x, dtype, runs, bitmap, to, room);                                                            \
    }                                                                                                             \
    void gck_portable_unpack_nonzeros##bits(const uint8_t *bitmap, const void *from, int64_t room, int64_t runs,  \
                                            void *x)                                                              \
    {                                                                                                             \
        (void)room;                                                                                               \
        unpack(bitmap, from, runs, dtype, x);                                                                     \
    }
DEFINE(32, GCK_F32)
DEFINE(16, GCK_BF16)
