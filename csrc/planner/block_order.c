/* block_order.c: a sorted array; few blocks are free at a time. */
#include "planner/block_order.h"

#include <string.h>

static int is_before(const gck_block *block, int by_size, int32_t stream, int64_t size, int64_t address)
{
    if (block->stream != stream) {
        return block->stream < stream;
    }
    if (by_size && block->size != size) {
        return block->size < size;
    }
    return block->address < address;
}

int64_t gck_block_order_find(const gck_block_order *order, const gck_block *blocks, int32_t stream, int64_t size,
                             int64_t address)
{
    int64_t low = 0, high = order->n;

    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (is_before(&blocks[order->at[middle]], order->by_size, stream, size, address)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static int64_t place_of(const gck_block_order *order, const gck_block *blocks, int32_t block)
{
    const gck_block *b = &blocks[block];

    return gck_block_order_find(order, blocks, b->stream, b->size, b->address);
}

void gck_block_order_add(gck_block_order *order, const gck_block *blocks, int32_t block)
{
    const int64_t place = place_of(order, blocks, block);

    memmove(&order->at[place + 1], &order->at[place], (size_t)(order->n - place) * sizeof *order->at);
    order->at[place] = block;
    order->n++;
}

void gck_block_order_remove(gck_block_order *order, const gck_block *blocks, int32_t block)
{
    const int64_t place = place_of(order, blocks, block);

    order->n--;
    memmove(&order->at[place], &order->at[place + 1], (size_t)(order->n - place) * sizeof *order->at);
}
