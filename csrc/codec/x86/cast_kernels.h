/* cast_kernels.h: the kernels of bf16, fp16 and mask, for vectors of any width; a template.
 *
 * avx2.h and avx512.h define `vec` and the v_ functions on it; the includer defines ISA, its instruction set's name. */
#include "codec/format/cast.h"
#include "codec/portable/kernels_portable.h"

enum { WORDS = sizeof(vec) / 4, AT_A_TIME = 64 };

/* ---- bf16, fp16 ---- */

/* bfloat16 in the lower halves of words, of values that are no NaN and do not overflow. */
INLINE vec rounded(vec v, vec one, vec half)
{
    const vec up = v_add(half, v_and(v_shr(v, 16, GCK_F32), one), GCK_F32);
    return v_shr(v_add(v, up, GCK_F32), 16, GCK_F32);
}

/* Convert 64 values at a time.  Blocks that hold a value beyond the end, infinite or NaN go to the
 * reference. */
INLINE int narrow(gck_dtype dtype, gck_narrow *reference, const float *x, int64_t n, uint16_t *to, int stream)
{
    const vec abs = v_kept(0x7FFFFFFFu), last = v_kept(gck_cast_end(dtype) - 1), one = v_kept(1), half = v_kept(0x7FFF);
    int status = GCK_OK;
    int64_t i = 0;

    for (; i + AT_A_TIME <= n; i += AT_A_TIME) {
        vec v[AT_A_TIME / WORDS], most = v_all32(0);
        prefetch(x + i, sizeof v, NEXT_PAGE);
        for (int k = 0; k < AT_A_TIME / WORDS; k++) {
            v[k] = v_load(x + i + WORDS * k);
            most = v_max(most, v_and(v[k], abs), GCK_F32);
        }
        if (v_any_above(most, last)) {
            status |= reference(x + i, AT_A_TIME, to + i, 0);
            continue;
        }
        for (int k = 0; k < AT_A_TIME / WORDS; k += 2) {
            const vec w = dtype == GCK_F16 ? v_to_f16(v[k], v[k + 1])
                                           : v_to_words(rounded(v[k], one, half), rounded(v[k + 1], one, half));
            v_store(to + i + WORDS * k, w, stream);
        }
    }
    return status | reference(x + i, n - i, to + i, 0);
}

INLINE void widen(gck_dtype dtype, gck_widen *reference, const uint16_t *from, int64_t n, float *x, int stream)
{
    const vec quiet = v_kept(0x400000u);
    int64_t i = 0;

    for (; i + WORDS <= n; i += WORDS) {
        /* A NaN that is not quiet comes from a damaged payload, never from an encoder. */
        const vec v = dtype == GCK_F16 ? v_of_f16(from + i)
                                       : v_or_if_nan(v_shl(v_of_words(from + i), 16, GCK_F32), quiet);
        v_store(x + i, v, stream);
    }
    reference(from + i, n - i, x + i, 0);
}

#define KERNELS(name, dtype)                                                                          \
    int KERNEL(ISA, to_##name)(const float *x, int64_t n, uint16_t *to, int streaming)                \
    {                                                                                                 \
        int status;                                                                                   \
        STREAMED(status = narrow, to, dtype, gck_portable_to_##name, x, n, to)                        \
        return status;                                                                                \
    }                                                                                                 \
    void KERNEL(ISA, from_##name)(const uint16_t *from, int64_t n, float *x, int streaming)           \
    {                                                                                                 \
        STREAMED(widen, x, dtype, gck_portable_from_##name, from, n, x)                               \
    }
KERNELS(bf16, GCK_BF16)
KERNELS(f16, GCK_F16)

/* ---- mask ---- */

INLINE void pack(const uint8_t *x, int64_t ngroups, uint8_t *to, int stream)
{
    for (int64_t i = 0; i < 2 * ngroups; i++, x += 64, to += 8) {
        uint64_t bits = 0;
        for (int k = 0; k < 64; k += (int)sizeof(vec)) {
            bits |= v_nonzero_bytes(v_load(x + k)) << k;
        }
        if (stream) {
            _mm_stream_si64((long long *)(void *)to, (long long)bits);
        } else {
            memcpy(to, &bits, sizeof bits);
        }
    }
}

INLINE void unpack(const uint8_t *from, int64_t ngroups, uint8_t *x, int stream)
{
    const vec one = v_kept(0x01010101u);

    for (const uint8_t *end = from + ngroups * (GCK_GROUP / 8); from < end; from += sizeof(vec) / 8, x += sizeof(vec)) {
        v_store(x, v_bools(from, one), stream);
    }
}

void KERNEL(ISA, mask_pack)(const uint8_t *x, int64_t ngroups, uint8_t *to, int streaming)
{
    STREAMED(pack, to, x, ngroups, to)
}

void KERNEL(ISA, mask_unpack)(const uint8_t *from, int64_t ngroups, uint8_t *x, int streaming)
{
    STREAMED(unpack, x, from, ngroups, x)
}
