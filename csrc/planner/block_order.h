/* block_order.h: blocks of memory, and some of them in order. */
#ifndef GRADCKPT_BLOCK_ORDER_H
#define GRADCKPT_BLOCK_ORDER_H

#include <stdint.h>

enum { GCK_NO_BLOCK = -1 };

/* A part of a segment.  Mapped is all memory but the unused addresses of an expandable segment. */
typedef struct {
    int64_t address, size;
    int32_t previous, next;                  /* its neighbours in the segment, by place */
    int32_t stream;
    uint8_t small, allocated, mapped;
} gck_block;

/* Places of blocks by stream, size (or not) and address.  Room for all of them is the owner's matter. */
typedef struct {
    int32_t *at;
    int64_t  n;
    int      by_size;
} gck_block_order;

/* The number of blocks before (stream, size, address). */
int64_t gck_block_order_find(const gck_block_order *order, const gck_block *blocks, int32_t stream, int64_t size,
                             int64_t address);

void gck_block_order_add(gck_block_order *order, const gck_block *blocks, int32_t block);
void gck_block_order_remove(gck_block_order *order, const gck_block *blocks, int32_t block);

#endif
