/* nonzeros_avx2.c: sparse for AVX2: four values at a time, moved by a shuffle that their bits choose.
 *
 * A store writes four values, and a load reads four, of which fewer may count: near the end of the room
 * a run goes to the portable code. */
#if defined(__x86_64__)
#include "codec/x86/avx2.h"
#include "codec/portable/nonzeros_portable.h"

enum { MOVED = 4 };

/* Bytes of the shuffles: `at` is the first of two or four, 0x80 writes zeros. */
#define TWO(at)  (at), (at) + 1
#define FOUR(at) (at), (at) + 1, (at) + 2, (at) + 3
#define NO2 0x80, 0x80
#define NO4 0x80, 0x80, 0x80, 0x80

/* Values whose bits are set to the front. */
#define FRONT(V, N)                                                                                            \
    {N, N, N, N}, {V(0), N, N, N}, {V(1), N, N, N}, {V(0), V(1), N, N}, {V(2), N, N, N}, {V(0), V(2), N, N},   \
    {V(1), V(2), N, N}, {V(0), V(1), V(2), N}, {V(3), N, N, N}, {V(0), V(3), N, N}, {V(1), V(3), N, N},        \
    {V(0), V(1), V(3), N}, {V(2), V(3), N, N}, {V(0), V(2), V(3), N}, {V(1), V(2), V(3), N},                   \
    {V(0), V(1), V(2), V(3)}
/* Values from the front to the places whose bits are set. */
#define BACK(V, N)                                                                                             \
    {N, N, N, N}, {V(0), N, N, N}, {N, V(0), N, N}, {V(0), V(1), N, N}, {N, N, V(0), N}, {V(0), N, V(1), N},   \
    {N, V(0), V(1), N}, {V(0), V(1), V(2), N}, {N, N, N, V(0)}, {V(0), N, N, V(1)}, {N, V(0), N, V(1)},        \
    {V(0), V(1), N, V(2)}, {N, N, V(0), V(1)}, {V(0), N, V(1), V(2)}, {N, V(0), V(1), V(2)},                   \
    {V(0), V(1), V(2), V(3)}
#define V16(i) TWO(2 * (i))
#define V32(i) FOUR(4 * (i))

static const uint8_t front16[16][8] = {FRONT(V16, NO2)}, back16[16][8] = {BACK(V16, NO2)};
static const _Alignas(16) uint8_t front32[16][16] = {FRONT(V32, NO4)}, back32[16][16] = {BACK(V32, NO4)};
static const uint8_t set[16] = {0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4};

INLINE __m128i load4(const void *p, int item)
{
    return item == 4 ? _mm_loadu_si128((const __m128i *)p) : _mm_loadl_epi64((const __m128i *)p);
}

INLINE void store4(void *p, __m128i v, int item)
{
    if (item == 4) {
        _mm_storeu_si128((__m128i *)p, v);
    } else {
        _mm_storel_epi64((__m128i *)p, v);
    }
}

INLINE uint32_t nonzeros_of_32(const char *x, int item)
{
    const __m256i *v = (const __m256i *)(const void *)x, zero = _mm256_setzero_si256();

    if (item == 4) {
        uint32_t bits = 0;
        for (int i = 0; i < 4; i++) {
            const __m256i zeros = _mm256_cmpeq_epi32(_mm256_loadu_si256(v + i), zero);
            bits |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(zeros)) << (8 * i);
        }
        return ~bits;
    }
    const __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256(v), zero);
    const __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256(v + 1), zero);
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8));
}

INLINE int64_t pack(const void *x, int item, int64_t runs, uint8_t *bitmap, void *to, int64_t room)
{
    const char *values = x;
    char *out = to;
    int64_t left = room;

    for (int64_t i = 0; i < runs; i++, values += GCK_RUN * item) {
        const uint64_t bits = nonzeros_of_32(values, item) | (uint64_t)nonzeros_of_32(values + 32 * item, item) << 32;
        const int count = __builtin_popcountll(bits);
        if (count > left) {
            return -1;
        }
        memcpy(bitmap + i * (int64_t)sizeof bits, &bits, sizeof bits);
        if (left - count >= MOVED) {
            char *at = out;
            for (int k = 0; k < GCK_RUN / MOVED; k++) {
                const unsigned four = bits >> (MOVED * k) & 15u;
                const __m128i order = load4(item == 4 ? front32[four] : front16[four], item);
                store4(at, _mm_shuffle_epi8(load4(values + MOVED * k * item, item), order), item);
                at += set[four] * item;
            }
        } else {
            gck_pack_run(values, (size_t)item, bits, out);
        }
        out += count * item;
        left -= count;
    }
    return room - left;
}

INLINE void unpack(const uint8_t *bitmap, const void *from, int64_t room, int item, int64_t runs, void *x)
{
    const char *packed = from;
    char *values = x;
    int64_t left = room;
    uint64_t bits;

    for (int64_t i = 0; i < runs; i++, values += GCK_RUN * item) {
        memcpy(&bits, bitmap + i * (int64_t)sizeof bits, sizeof bits);
        const int count = __builtin_popcountll(bits);
        if (left - count >= MOVED) {
            const char *at = packed;
            for (int k = 0; k < GCK_RUN / MOVED; k++) {
                const unsigned four = bits >> (MOVED * k) & 15u;
                const __m128i order = load4(item == 4 ? back32[four] : back16[four], item);
                store4(values + MOVED * k * item, _mm_shuffle_epi8(load4(at, item), order), item);
                at += set[four] * item;
            }
        } else {
            gck_unpack_run(packed, (size_t)item, bits, values);
        }
        packed += count * item;
        left -= count;
    }
}

#define DEFINE(bits)                                                                                           \
    int64_t gck_avx2_pack_nonzeros##bits(const void *x, int64_t runs, uint8_t *bitmap, void *to, int64_t room) \
    {                                                                                                          \
        return pack(x, bits / 8, runs, bitmap, to, room);                                                      \
    }                                                                                                          \
    void gck_avx2_unpack_nonzeros##bits(const uint8_t *bitmap, const void *from, int64_t room, int64_t runs,   \
                                        void *x)                                                               \
    {                                                                                                          \
        unpack(bitmap, from, room, bits / 8, runs, x);                                                         \
    }
DEFINE(32)
DEFINE(16)

#else
typedef int gck_nonzeros_avx2_is_empty;  /* ISO C requires a declaration in every file */
#endif
