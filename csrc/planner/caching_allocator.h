/* caching_allocator.h: the memory of a device as torch's caching allocator for CUDA hands it out.
 *
 * The rules are those of torch 2.13 with its defaults: no max_split_size, no roundup_power2_divisions,
 * no garbage collection, no graph pools, and no block that another stream uses (record_stream).
 *
 *     sizes     of blocks are multiples of 512 bytes, at least one
 *     pools     up to 1 MiB a block comes from the small pool, else from the large one
 *     best fit  of the pool's free blocks of this stream the smallest that is large enough; of equal
 *               ones that of the lowest address
 *     segments  without such a block the device gives one: 2 MiB for the small pool, 20 MiB for less
 *               than 10 MiB, else the size rounded up to 2 MiB
 *     split     what is left of a block becomes a free block if it has at least 512 bytes in the small
 *               pool, and more than 1 MiB in the large one
 *     merge     a freed block joins the free neighbours of its segment
 *     retry     if the device has too little left, all segments that are one free block go back to it;
 *               then the request fails
 *
 * With expandable segments each pool has one per stream, a range of addresses that is filled with pages
 * (2 MiB and 20 MiB) where the lowest free address has room; splits leave 512 bytes or more; a block at
 * the end counts for best fit as what it could grow to; and retrying gives back all whole free pages.
 * Here addresses never run out.
 *
 * A device places segments where it likes: here each lies above those before it.  Only ties ask. */
#ifndef GRADCKPT_CACHING_ALLOCATOR_H
#define GRADCKPT_CACHING_ALLOCATOR_H

#include "planner/block_order.h"

enum { GCK_MOST_STREAMS = 1 << 16 };

typedef struct {
    int64_t         capacity;                /* bytes that the device has for segments           */
    int             expandable;
    int64_t         allocated, reserved;     /* bytes of blocks in use, and of segments          */
    int64_t         most_allocated, most_reserved;
    gck_block      *blocks;                  /* malloc; unused ones are linked by `next`         */
    int64_t         n, room;                 /* used so far, and allocated                       */
    int32_t         unused;
    gck_block_order free[2], unmapped[2];    /* by `small`; room for all blocks each; malloc     */
    int64_t         end;                     /* of all addresses                                 */
} gck_caching_allocator;

void gck_caching_allocator_init(gck_caching_allocator *allocator, int64_t capacity, int expandable);
void gck_caching_allocator_free(gck_caching_allocator *allocator);

/* Allocate bytes, of which the sum of all is below 2**60, on a stream from 0 on: *block, or GCK_NO_BLOCK
 * if the capacity is too small.  GCK_OK or GCK_E_MEMORY. */
int gck_allocate(gck_caching_allocator *allocator, int64_t bytes, int32_t stream, int32_t *block);

void gck_release(gck_caching_allocator *allocator, int32_t block);

#endif
