/* nonzeros_portable.c: the kernels of sparse.h in portable C.
 *
 * Bitmaps and counts by words of 64 bits; every x86-64 has SSE2, which is three times as fast, and as
 * fast as memory. */
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

int64_t gck_count_words(const void *values, int64_t count, gck_dtype dtype, int unsigned_zeros)
{
    const int n = (int)(count * (int64_t)gck_itemsize(dtype) / (int64_t)sizeof(__m128i));
    __m128i zeros[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
    uint32_t word[4];
    uint64_t sum = 0;

    for (int i = 0; i < n; i += 2) {                           /* of words, each up to 1024: -1 for a zero */
        for (int k = 0; k < 2; k++) {
            const __m128i found = zeros_of(values, i + k, dtype, unsigned_zeros);
            zeros[k] = dtype == GCK_F32 ? _mm_sub_epi32(zeros[k], found) : _mm_sub_epi16(zeros[k], found);
        }
    }
    _mm_storeu_si128((__m128i *)(void *)word, _mm_add_epi16(zeros[0], zeros[1]));
    for (int i = 0; i < 4; i++) {
        sum += dtype == GCK_F32 ? word[i] : (word[i] & 0xFFFFu) + (word[i] >> 16);
    }
    return count - (int64_t)sum;
}

#else

/* The sign bits of the words in w that are not zero: two words of 32 bits, or four of 16. */
static inline uint64_t signs_of_nonzeros(uint64_t w, uint64_t rest, int unsigned_zeros)
{
    return (((w & rest) + rest) | (unsigned_zeros ? 0 : w)) & ~rest;
}

enum { WORDS_OF_64 = 64 };
static const uint64_t rest32 = 0x7FFFFFFF7FFFFFFFu, rest16 = 0x7FFF7FFF7FFF7FFFu;

uint64_t gck_nonzeros_of(const void *values, gck_dtype dtype, int unsigned_zeros)
{
    const char *at = values;
    uint64_t bits = 0, w;

    if (dtype == GCK_F32) {
        for (int i = 0; i < WORDS_OF_64; i += 2, at += sizeof w) {
            memcpy(&w, at, sizeof w);
            w = signs_of_nonzeros(w, rest32, unsigned_zeros);
            bits |= ((w >> 31 & 1u) | w >> 62) << i;
        }
        return bits;
    }
    for (int i = 0; i < WORDS_OF_64; i += 4, at += sizeof w) {
        memcpy(&w, at, sizeof w);
        w = signs_of_nonzeros(w, rest16, unsigned_zeros) >> 15;
        bits |= (w * 0x0001000200040008u >> 48 & 15u) << i;    /* bits 0, 16, 32, 48 side by side */
    }
    return bits;
}

int64_t gck_count_words(const void *values, int64_t count, gck_dtype dtype, int unsigned_zeros)
{
    const char *at = values;
    uint64_t sum = 0, w;

    if (dtype == GCK_F32) {
        for (int64_t i = 0; i < count; i += 2, at += sizeof w) {
            memcpy(&w, at, sizeof w);
            sum += signs_of_nonzeros(w, rest32, unsigned_zeros) >> 31;         /* two sums side by side */
        }
        return (int64_t)((sum & 0xFFFFFFFFu) + (sum >> 32));
    }
    for (int64_t i = 0; i < count; i += 4, at += sizeof w) {
        memcpy(&w, at, sizeof w);
        sum += signs_of_nonzeros(w, rest16, unsigned_zeros) >> 15;             /* four */
    }
    return (int64_t)((sum & 0xFFFFu) + (sum >> 16 & 0xFFFFu) + (sum >> 32 & 0xFFFFu) + (sum >> 48));
}

#endif

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
