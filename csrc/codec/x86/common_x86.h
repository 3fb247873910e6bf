/* common_x86.h: what the kernels of all instruction sets share: their loops, prefetching, and groups that are not
 * ordinary.
 *
 * The includer has defined INLINE and can_stream().  Loops are plain C: the compiler makes vectors of them. */
#ifndef GRADCKPT_COMMON_X86_H
#define GRADCKPT_COMMON_X86_H

#include "codec/format/group.h"
#include "codec/portable/kernels_portable.h"

/* ---- memory ---- */

/* Two copies of a loop, so that it does not test at every store. */
#define STREAMED(loop, to, ...)                                                                     \
    if (can_stream(to, streaming)) {                                                                \
        loop(__VA_ARGS__, 1);                                                                       \
        _mm_sfence();                                                                               \
    } else {                                                                                        \
        loop(__VA_ARGS__, 0);                                                                       \
    }

/* What is read once is prefetched a page ahead.  One core then reads memory a fifth faster, because the CPU's
 * own prefetcher stops at every page (measured on Zen 3; 2 to 16 KiB perform alike). */
enum { NEXT_PAGE = 4096 };

/* Prefetch the nbytes that lie `ahead` bytes beyond p. */
INLINE void prefetch(const void *p, size_t nbytes, size_t ahead)
{
    for (size_t at = 0; at < nbytes; at += 64) {
        /* An integer: the address may lie beyond the tensor, where a pointer may not. */
        __builtin_prefetch((const void *)((uintptr_t)p + ahead + at));
    }
}

INLINE size_t group_nbytes(gck_dtype dtype) { return (dtype == GCK_F32 ? 4 : 2) * (size_t)GCK_GROUP; }

/* ---- groups ---- */

/* 1 when a nonzero bfloat16 is below `normal` in magnitude: its code may be a subnormal. */
static __attribute__((noinline, unused)) int any_subnormal(const uint16_t *x, uint32_t normal)
{
    const uint16_t end = (uint16_t)(normal - 1u);
    uint16_t any = 0;

    for (int i = 0; i < GCK_GROUP; i++) {
        any |= (uint16_t)((x[i] & 0x7FFFu) - 1u) < end;
    }
    return any;
}

/* 1 when at most GCK_MOST_OUTLIERS values of a group are at least a quarter of the largest, `raw` in the bits of the
 * dtype; or when that is not looked at. */
INLINE int few_are_far(gck_dtype dtype, const void *x, uint32_t raw)
{
    const uint32_t quarter = dtype == GCK_F32 ? 2u << 23 : dtype == GCK_BF16 ? 2u << 7 : 2u << 10;
    const int32_t least = (int32_t)(raw - quarter);
    int32_t far = 0;
    int16_t far_words = 0;

    if (raw <= quarter + quarter / 2) {                                    /* a quarter is subnormal */
        return 1;
    }
    for (int i = 0; i < GCK_GROUP && dtype == GCK_F32; i++) {
        far += (((const int32_t *)x)[i] & 0x7FFFFFFF) >= least;
    }
    for (int i = 0; i < GCK_GROUP && dtype != GCK_F32; i++) {
        far_words = (int16_t)(far_words + ((int16_t)(((const uint16_t *)x)[i] & 0x7FFF) >= (int16_t)least));
    }
    return far + far_words <= GCK_MOST_OUTLIERS;
}

/* ---- groups that are not ordinary ---- */

/* nbytes: a multiple of 8. */
INLINE int all_zero(const void *p, size_t nbytes, uint64_t mask)
{
    uint64_t any = 0, word;

    for (size_t at = 0; at < nbytes; at += sizeof word) {
        memcpy(&word, (const char *)p + at, sizeof word);
        any |= word;
    }
    return (any & mask) == 0;
}

/* The vectors decode it as ordinary ones. */
static __attribute__((noinline, unused)) int is_zero_group(gck_format format, const uint8_t *codes, uint32_t stored)
{
    return stored == 0 && all_zero(codes, gck_code_bytes(format), ~(uint64_t)0);
}

/* Encode or decode group `index` of its tensor by the reference; of rotated formats, whose groups are often such, with
 * the instructions that the includer may use.  amax: of y, if the group may be ordinary, and then the answer is whether
 * it was not; 0: by all means.  dither: NULL rounds to nearest. */
typedef int encode_unusual(const void *x, float amax, int64_t index, const gck_dither *dither, uint8_t *codes,
                           uint16_t *side);
typedef void decode_unusual(const uint8_t *codes, const uint16_t *side, int64_t index, void *x);

INLINE int encode_by_reference(gck_format format, gck_dtype dtype, const void *x, float amax, int64_t index,
                               const gck_dither *dither, uint8_t *codes, uint16_t *side)
{
    uint16_t noise[GCK_GROUP];

    if (gck_is_rotated(format) && amax > 0.f) {
        return gck_encode_unusual(format, x, dtype, amax, index, dither, codes, side);
    }
    if (all_zero(x, group_nbytes(dtype), dtype == GCK_F32 ? 0x7FFFFFFF7FFFFFFFu : 0x7FFF7FFF7FFF7FFFu)) {
        memset(codes, 0, gck_code_bytes(format));      /* faster: padding and masks are common */
        memset(side, 0, 2 * gck_side_words(format));
        return 1;
    }
    if (dither != NULL && gck_is_rotated(format)) {
        gck_noise_of_group(dither, index, noise);
    }
    if (gck_is_rotated(format)) {
        gck_encode_group(format, x, dtype, GCK_GROUP, index, dither != NULL ? noise : NULL, codes, side);
    } else if (dither != NULL) {
        gck_kernels_portable.encode_noisy[format][dtype](x, 1, codes, side, dither, index);
    } else {
        gck_kernels_portable.encode[format][dtype](x, 1, codes, side, index, 0);
    }
    return 1;
}

INLINE void decode_by_reference(gck_format format, gck_dtype dtype, const uint8_t *codes, const uint16_t *side,
                                int64_t index, void *x)
{
    if (gck_is_rotated(format)) {
        gck_decode_group(format, codes, side, index, x, dtype, GCK_GROUP);
    } else {
        gck_kernels_portable.decode[format][dtype](codes, side, 1, x, index, 0);
    }
}

/* ---- kernels ---- */

/* The kernels of a format and a dtype, both constants to the compiler, from the includer's encode() and decode(). */
#define X86_KERNELS(isa, format, dtype, encode, decode)                                                        \
    static __attribute__((noinline)) int encode_unusual_##format##_##dtype(                                    \
        const void *x, float amax, int64_t index, const gck_dither *dither, uint8_t *codes, uint16_t *side)    \
    {                                                                                                          \
        return encode_by_reference(format, dtype, x, amax, index, dither, codes, side);                        \
    }                                                                                                          \
    static __attribute__((noinline)) void decode_unusual_##format##_##dtype(                                   \
        const uint8_t *codes, const uint16_t *side, int64_t index, void *x)                                    \
    {                                                                                                          \
        decode_by_reference(format, dtype, codes, side, index, x);                                             \
    }                                                                                                          \
    void gck_##isa##_encode_##format##_##dtype(const void *x, int64_t ngroups, uint8_t *codes,                 \
                                               uint16_t *side, int64_t index, int streaming)                   \
    {                                                                                                          \
        STREAMED(encode, codes, format, dtype, x, ngroups, codes, side, index, NULL,                           \
                 encode_unusual_##format##_##dtype)                                                            \
    }                                                                                                          \
    void gck_##isa##_encode_noisy_##format##_##dtype(const void *x, int64_t ngroups, uint8_t *codes,           \
                                                     uint16_t *side, const gck_dither *dither, int64_t index)  \
    {                                                                                                          \
        encode(format, dtype, x, ngroups, codes, side, index, dither, encode_unusual_##format##_##dtype, 0);   \
    }                                                                                                          \
    void gck_##isa##_decode_##format##_##dtype(const uint8_t *codes, const uint16_t *side, int64_t ngroups,    \
                                               void *x, int64_t index, int streaming)                          \
    {                                                                                                          \
        STREAMED(decode, x, format, dtype, codes, side, ngroups, x, index, decode_unusual_##format##_##dtype)  \
    }
#define X86_DTYPES(isa, format, encode, decode)          \
    X86_KERNELS(isa, format, GCK_F32, encode, decode)    \
    X86_KERNELS(isa, format, GCK_F16, encode, decode)    \
    X86_KERNELS(isa, format, GCK_BF16, encode, decode)

#define KERNEL_OF(isa, function) gck_##isa##_##function
#define KERNEL(isa, function) KERNEL_OF(isa, function)

#endif
