/* nonzeros_portable.h: 64 words and the bits that say which of them are not zero. */
#ifndef GRADCKPT_NONZEROS_PORTABLE_H
#define GRADCKPT_NONZEROS_PORTABLE_H

#include "codec/format/sparse.h"

enum { GCK_RUN = 64 };             /* values whose bits are one word */

/* Bit i: the bits of value i of 64 are not all zero.  unsigned_zeros: the sign bit does not count. */
uint64_t gck_nonzeros_of(const void *values, gck_dtype dtype, int unsigned_zeros);

/* How many of `count` values, a multiple of 128 up to GCK_BLOCK, are not zero. */
int64_t gck_count_words(const void *values, int64_t count, gck_dtype dtype, int unsigned_zeros);

/* Without an instruction for it, which not every x86-64 has, and faster than gcc's table. */
static inline int gck_popcount(uint64_t bits)
{
    bits -= bits >> 1 & 0x5555555555555555u;
    bits = (bits & 0x3333333333333333u) + (bits >> 2 & 0x3333333333333333u);
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
    return (int)(bits * 0x0101010101010101u >> 56);
}

/* The values of a run whose bits are set, one after the other, and back; no other memory is touched. */
static inline void gck_pack_run(const void *values, size_t item, uint64_t bits, void *to)
{
    uint32_t *to32 = to;
    uint16_t *to16 = to;

    if (bits == ~(uint64_t)0) {
        memcpy(to, values, GCK_RUN * item);
        return;
    }
    for (; item == sizeof *to32 && bits != 0; bits &= bits - 1) {
        *to32++ = ((const uint32_t *)values)[gck_lowest_bit(bits)];
    }
    for (; bits != 0; bits &= bits - 1) {
        *to16++ = ((const uint16_t *)values)[gck_lowest_bit(bits)];
    }
}

static inline void gck_unpack_run(const void *from, size_t item, uint64_t bits, void *values)
{
    const uint32_t *from32 = from;
    const uint16_t *from16 = from;

    if (bits == ~(uint64_t)0) {
        memcpy(values, from, GCK_RUN * item);
        return;
    }
    memset(values, 0, GCK_RUN * item);
    for (; item == sizeof *from32 && bits != 0; bits &= bits - 1) {
        ((uint32_t *)values)[gck_lowest_bit(bits)] = *from32++;
    }
    for (; bits != 0; bits &= bits - 1) {
        ((uint16_t *)values)[gck_lowest_bit(bits)] = *from16++;
    }
}

#endif
