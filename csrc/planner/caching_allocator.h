/* caching_allocator.h: what a sequence of allocations and releases needs of a device whose memory torch's
 * caching allocator for CUDA hands out.
 *
 * The rules are those of torch 2.13 with its defaults: no expandable segments, no max_split_size, no
 * roundup_power2_divisions, no garbage collection, no graph pools, and one stream.
 *
 *     sizes     of blocks are multiples of 512 bytes, at least one
 *     pools     up to 1 MiB a block comes from the small pool, else from the large one
 *     best fit  of the pool's free blocks the smallest that is large enough; of equal ones that of the
 *               lowest address
 *     segments  without such a block the device gives one: 2 MiB for the small pool, 20 MiB for less
 *               than 10 MiB, else the size rounded up to 2 MiB
 *     split     what is left of a block becomes a free block if it has at least 512 bytes in the small
 *               pool, and more than 1 MiB in the large one
 *     merge     a freed block joins the free neighbours of its segment
 *     retry     if the device has too little left, all segments that are one free block go back to it;
 *               then the request fails
 *
 * A device places segments where it likes: here each lies above those before it.  Only ties ask. */
#ifndef GRADCKPT_CACHING_ALLOCATOR_H
#define GRADCKPT_CACHING_ALLOCATOR_H

#include "gradckpt.h"

/* Allocate `bytes` > 0 under a name from 0 on, or release (0) what has this name. */
typedef struct {
    int64_t bytes, name;
} gck_memory_change;

typedef struct {
    const gck_memory_change *changes;
    int64_t                  n;
} gck_memory_trace;

/* The most at a time of what was asked for, of blocks in use, of segments; and the smallest capacity from
 * which on the trace completes. */
typedef struct {
    int64_t requested, allocated, reserved, needed;
} gck_memory_use;

/* GCK_OK; GCK_E_RANGE: a name is negative, not below n, allocated twice or released without having
 * been allocated, bytes are negative or their sum reaches 2**60; or GCK_E_MEMORY. */
int gck_memory_trace_check(const gck_memory_trace *trace);

/* Let a device play a trace that was checked: without a limit, and to find what is needed with less and
 * less.  One run tells what all capacities between the most that it had reserved and the least that it was
 * refused do, so the search goes down from run to run, over every capacity: what a smaller one completes
 * says nothing of those above it.  GCK_OK or GCK_E_MEMORY. */
int gck_memory_trace_needed(const gck_memory_trace *trace, gck_memory_use *use);

#endif
