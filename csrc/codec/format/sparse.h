/* sparse.h: the payload of `sparse`: which values are not zero, and those.  This header is the format;
 * the host and sparse.cu share it.
 *
 * Payload of n values, G = ceil(n / 128) groups (the last one padded with zeros), B = ceil(n / 4096)
 * blocks, of which K have bits that are not all zero (-0 is such a value):
 *
 *     uint8_t  bitmap[G][16];     offset 0; bit i % 8 of byte i / 8 of a group: value i is among the K
 *     uint64_t before[B];         offset 16 G: how many of the K are in earlier blocks
 *     word     value[K];          offset 16 G + 8 B: their bits, by index
 *
 * Its size depends on the values.  A payload as large as the tensor is the tensor: its values alone.
 *
 * A device has room for C values, which it does not count first.  A block whose values do not lie
 * within the first C has none in the payload: they decode to NaN, and so does any block of a damaged
 * payload that would reach past its end. */
#ifndef GRADCKPT_SPARSE_H
#define GRADCKPT_SPARSE_H

#include "codec/format/lossless.h"

enum { GCK_BITMAP = GCK_GROUP / 8 };     /* bytes of a group's bitmap */

GCK_LAYOUT_FN int64_t gck_blocks_of(int64_t numel) { return numel / GCK_BLOCK + (numel % GCK_BLOCK != 0); }

/* Bytes of everything but the values. */
GCK_LAYOUT_FN int64_t gck_sparse_head(int64_t numel)
{
    return GCK_BITMAP * gck_groups_of(numel) + (int64_t)sizeof(uint64_t) * gck_blocks_of(numel);
}

/* Bytes of a payload with room for so many values, at most those of the tensor. */
static inline int64_t gck_sparse_nbytes(int64_t numel, gck_dtype dtype, int64_t values)
{
    const int64_t item = (int64_t)gck_itemsize(dtype), raw = numel * item;
    const int64_t nbytes = gck_sparse_head(numel) + values * item;

    return nbytes < raw ? nbytes : raw;
}

/* `values` of all, in units of 1 / GCK_WHOLE, rounded up. */
GCK_LAYOUT_FN uint32_t gck_part_of(int64_t values, int64_t numel)
{
    const int64_t scaled = values * GCK_WHOLE;

    return (uint32_t)(scaled / numel + (scaled % numel != 0));
}

/* The parts of a payload. */
typedef struct {
    uint8_t  *bitmap;
    uint64_t *before;
    uint8_t  *values;
    int64_t   room;              /* values that fit; -1: not even the bitmap does */
} gck_sparse_parts;

/* nbytes: of the whole payload, fewer than those of the tensor. */
static inline gck_sparse_parts gck_sparse_parts_of(const void *payload, int64_t numel, gck_dtype dtype,
                                                   int64_t nbytes)
{
    const int64_t head = gck_sparse_head(numel);
    uint8_t *bytes = (uint8_t *)payload;
    const gck_sparse_parts parts = {
        bytes,
        (uint64_t *)(void *)(bytes + GCK_BITMAP * gck_groups_of(numel)),
        bytes + head,
        nbytes < head ? -1 : (nbytes - head) / (int64_t)gck_itemsize(dtype),
    };

    return parts;
}

/* 1 when `count` values after `before` others are within the room. */
GCK_LAYOUT_FN int gck_sparse_fits(uint64_t before, int64_t count, int64_t room)
{
    return before <= (uint64_t)room && count <= room - (int64_t)before;
}

#endif
