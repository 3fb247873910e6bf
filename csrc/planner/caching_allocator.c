/* caching_allocator.c: blocks, pools and segments. */
#include "planner/caching_allocator.h"

#include "planner/chain.h"

#include <stdlib.h>
#include <string.h>

#define MIB (INT64_C(1) << 20)

#define LEAST_BLOCK   512
#define MOST_SMALL    (1 * MIB)
#define SMALL_SEGMENT (2 * MIB)              /* and the page of an expandable one  */
#define LARGE_SEGMENT (20 * MIB)             /* likewise                           */
#define LEAST_LARGE   (10 * MIB)             /* from here on a segment of its own  */
#define LARGE_UNIT    (2 * MIB)
#define ADDRESSES     (LARGE_SEGMENT << 20)  /* of an expandable segment: 20 TiB   */

static int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

static int64_t segment_for(int64_t size)
{
    return size <= MOST_SMALL ? SMALL_SEGMENT : size < LEAST_LARGE ? LARGE_SEGMENT : round_up(size, LARGE_UNIT);
}

static int64_t page_of(const gck_block *block) { return block->small ? SMALL_SEGMENT : LARGE_SEGMENT; }

void gck_caching_allocator_init(gck_caching_allocator *a, int64_t capacity, int expandable)
{
    *a = (gck_caching_allocator){.capacity = capacity, .expandable = expandable, .unused = GCK_NO_BLOCK};
    a->free[0].by_size = a->free[1].by_size = 1;
}

void gck_caching_allocator_free(gck_caching_allocator *a)
{
    for (int small = 0; small < 2; small++) {
        free(a->free[small].at);
        free(a->unmapped[small].at);
    }
    free(a->blocks);
    a->blocks = NULL;
}

/* ---- blocks ---- */

static int enlarge(gck_block_order *order, int64_t room)
{
    int32_t *at = gck_planner_memory(room, sizeof *at);

    if (at == NULL) {
        return GCK_E_MEMORY;
    }
    if (order->n > 0) {
        memcpy(at, order->at, (size_t)order->n * sizeof *at);
    }
    free(order->at);
    order->at = at;
    return GCK_OK;
}

/* Make room for so many more blocks.  GCK_OK or GCK_E_MEMORY. */
static int reserve(gck_caching_allocator *a, int64_t more)
{
    const int64_t room = 2 * (a->n + more);
    gck_block *blocks;

    if (a->n + more <= a->room) {
        return GCK_OK;
    }
    for (int small = 0; small < 2; small++) {
        if (enlarge(&a->free[small], room) != GCK_OK || enlarge(&a->unmapped[small], room) != GCK_OK) {
            return GCK_E_MEMORY;
        }
    }
    if ((blocks = gck_planner_memory(room, sizeof *blocks)) == NULL) {
        return GCK_E_MEMORY;
    }
    if (a->n > 0) {
        memcpy(blocks, a->blocks, (size_t)a->n * sizeof *blocks);
    }
    free(a->blocks);
    a->blocks = blocks;
    a->room = room;
    return GCK_OK;
}

/* The place of a new block, for which there is room. */
static int32_t add_block(gck_caching_allocator *a, const gck_block *block)
{
    int32_t at = a->unused;

    if (at == GCK_NO_BLOCK) {
        at = (int32_t)a->n++;
    } else {
        a->unused = a->blocks[at].next;
    }
    a->blocks[at] = *block;
    return at;
}

static void drop_block(gck_caching_allocator *a, int32_t at)
{
    a->blocks[at].next = a->unused;
    a->unused = at;
}

static gck_block_order *order_of(gck_caching_allocator *a, const gck_block *block)
{
    return block->mapped ? &a->free[block->small] : &a->unmapped[block->small];
}

static void list(gck_caching_allocator *a, int32_t at)
{
    gck_block_order_add(order_of(a, &a->blocks[at]), a->blocks, at);
}

static void unlist(gck_caching_allocator *a, int32_t at)
{
    gck_block_order_remove(order_of(a, &a->blocks[at]), a->blocks, at);
}

/* Leave the first bytes of a block, which is not listed: the place of the block of the others. */
static int32_t cut(gck_caching_allocator *a, int32_t at, int64_t bytes)
{
    gck_block rest = a->blocks[at];

    rest.address += bytes;
    rest.size -= bytes;
    rest.previous = at;
    const int32_t place = add_block(a, &rest);
    if (rest.next != GCK_NO_BLOCK) {
        a->blocks[rest.next].previous = place;
    }
    a->blocks[at].size = bytes;
    a->blocks[at].next = place;
    return place;
}

/* Join a block, which is not listed, with a neighbour that is free as it is. */
static void join(gck_caching_allocator *a, int32_t at, int32_t other)
{
    gck_block *block = &a->blocks[at];

    if (other == GCK_NO_BLOCK || a->blocks[other].allocated || a->blocks[other].mapped != block->mapped) {
        return;
    }
    const gck_block joined = a->blocks[other];
    unlist(a, other);
    if (block->previous == other) {
        block->address = joined.address;
        block->previous = joined.previous;
        if (joined.previous != GCK_NO_BLOCK) {
            a->blocks[joined.previous].next = at;
        }
    } else {
        block->next = joined.next;
        if (joined.next != GCK_NO_BLOCK) {
            a->blocks[joined.next].previous = at;
        }
    }
    block->size += joined.size;
    drop_block(a, other);
}

static void join_neighbours(gck_caching_allocator *a, int32_t at)
{
    join(a, at, a->blocks[at].previous);
    join(a, at, a->blocks[at].next);
    list(a, at);
}

/* ---- the device ---- */

/* 1 when the device had so many bytes left. */
static int take_from_device(gck_caching_allocator *a, int64_t bytes)
{
    const int64_t then = a->reserved + bytes;

    if (then > a->capacity) {
        return 0;
    }
    a->reserved = then;
    a->most_reserved = then > a->most_reserved ? then : a->most_reserved;
    return 1;
}

static int32_t new_segment(gck_caching_allocator *a, int64_t size, int32_t stream, int small, int mapped)
{
    const gck_block whole = {.address = a->end, .size = size, .previous = GCK_NO_BLOCK, .next = GCK_NO_BLOCK,
                             .stream = stream, .small = (uint8_t)small, .mapped = (uint8_t)mapped};

    a->end += size;
    return add_block(a, &whole);
}

/* Give back what is free and whole: a segment, or pages.  GCK_OK or GCK_E_MEMORY. */
static int give_back_block(gck_caching_allocator *a, int32_t at, int *changed)
{
    gck_block *block = &a->blocks[at];
    const int64_t page = page_of(block), first = round_up(block->address, page);
    const int64_t end = (block->address + block->size) / page * page;

    *changed = 0;
    if (!a->expandable && block->previous == GCK_NO_BLOCK && block->next == GCK_NO_BLOCK) {
        *changed = 1;
        unlist(a, at);
        a->reserved -= block->size;
        drop_block(a, at);
    }
    if (!a->expandable || first >= end) {
        return GCK_OK;
    }
    if (reserve(a, 2) != GCK_OK) {
        return GCK_E_MEMORY;
    }
    *changed = 1;
    unlist(a, at);
    if (first > a->blocks[at].address) {
        const int32_t whole = cut(a, at, first - a->blocks[at].address);
        list(a, at);
        at = whole;
    }
    if (end < a->blocks[at].address + a->blocks[at].size) {
        list(a, cut(a, at, end - first));
    }
    a->blocks[at].mapped = 0;
    join_neighbours(a, at);
    a->reserved -= end - first;
    return GCK_OK;
}

static int give_back(gck_caching_allocator *a)
{
    for (int small = 0; small < 2; small++) {
        for (int64_t i = 0; i < a->free[small].n;) {
            int changed;
            if (give_back_block(a, a->free[small].at[i], &changed) != GCK_OK) {
                return GCK_E_MEMORY;
            }
            i = changed ? 0 : i + 1;
        }
    }
    return GCK_OK;
}

/* ---- expandable segments ---- */

static int64_t size_when_grown(const gck_caching_allocator *a, int32_t at)
{
    const gck_block *block = &a->blocks[at];
    const gck_block *next = block->next != GCK_NO_BLOCK ? &a->blocks[block->next] : NULL;

    return block->size + (next != NULL && !next->mapped ? next->size : 0);
}

static int is_room(const gck_caching_allocator *a, int32_t at, int64_t size)
{
    int64_t bytes = 0;

    while (bytes < size && at != GCK_NO_BLOCK && !a->blocks[at].allocated) {
        bytes += a->blocks[at].size;
        at = a->blocks[at].next;
    }
    return bytes >= size;
}

/* The lowest block at which pages make room: free, or without pages. */
static int32_t lowest_room(gck_caching_allocator *a, int64_t size, int32_t stream, int small)
{
    const gck_block_order *unmapped = &a->unmapped[small];

    for (int64_t i = gck_block_order_find(unmapped, a->blocks, stream, 0, 0); i < unmapped->n; i++) {
        int32_t at = unmapped->at[i];
        const int32_t before = a->blocks[at].previous;
        if (a->blocks[at].stream != stream) {
            break;
        }
        at = before != GCK_NO_BLOCK && !a->blocks[before].allocated ? before : at;
        if (is_room(a, at, size)) {
            return at;
        }
    }
    const int32_t whole = new_segment(a, ADDRESSES, stream, small, 0);
    list(a, whole);
    return whole;
}

/* Put pages under the first bytes of a block, which joins free neighbours.  1; 0: the device has too
 * little left. */
static int map(gck_caching_allocator *a, int32_t at, int64_t bytes)
{
    const int64_t pages = round_up(bytes, page_of(&a->blocks[at]));

    if (!take_from_device(a, pages)) {
        return 0;
    }
    unlist(a, at);
    if (pages < a->blocks[at].size) {
        list(a, cut(a, at, pages));
    }
    a->blocks[at].mapped = 1;
    join_neighbours(a, at);
    return 1;
}

/* *block: an unlisted one of at least this size, or GCK_NO_BLOCK.  GCK_OK or GCK_E_MEMORY. */
static int expand(gck_caching_allocator *a, int64_t size, int32_t stream, int small, int32_t *block)
{
    int32_t at;

    *block = GCK_NO_BLOCK;
    if (reserve(a, 2) != GCK_OK) {
        return GCK_E_MEMORY;
    }
    at = lowest_room(a, size, stream, small);
    if (!a->blocks[at].mapped && !map(a, at, a->blocks[at].size < size ? a->blocks[at].size : size)) {
        return GCK_OK;
    }
    while (a->blocks[at].size < size) {
        const int32_t next = a->blocks[at].next;          /* it has no pages */
        const int64_t wanted = size - a->blocks[at].size, has = a->blocks[next].size;
        if (reserve(a, 1) != GCK_OK) {
            return GCK_E_MEMORY;
        }
        if (!map(a, next, wanted < has ? wanted : has)) {
            return GCK_OK;
        }
        at = next;                                        /* which has joined what was before it */
    }
    unlist(a, at);
    *block = at;
    return GCK_OK;
}

/* ---- allocations ---- */

/* The free block that fits best, unlisted; or GCK_NO_BLOCK. */
static int32_t best_fit(gck_caching_allocator *a, int64_t size, int32_t stream, int small)
{
    const gck_block_order *order = &a->free[small];
    int64_t i = gck_block_order_find(order, a->blocks, stream, size, 0);

    if (i == order->n || a->blocks[order->at[i]].stream != stream) {
        return GCK_NO_BLOCK;
    }
    while (a->expandable && i + 1 < order->n && a->blocks[order->at[i + 1]].stream == stream
           && size_when_grown(a, order->at[i + 1]) < size_when_grown(a, order->at[i])) {
        i++;
    }
    const int32_t found = order->at[i];
    unlist(a, found);
    return found;
}

static int from_device(gck_caching_allocator *a, int64_t size, int32_t stream, int small, int32_t *block)
{
    const int64_t segment = segment_for(size);

    if (a->expandable) {
        return expand(a, size, stream, small, block);
    }
    *block = take_from_device(a, segment) ? new_segment(a, segment, stream, small, 1) : GCK_NO_BLOCK;
    return GCK_OK;
}

int gck_allocate(gck_caching_allocator *a, int64_t bytes, int32_t stream, int32_t *block)
{
    const int64_t size = round_up(bytes, LEAST_BLOCK);
    const int small = size <= MOST_SMALL;
    int status = reserve(a, 2);

    if (status != GCK_OK) {
        return status;
    }
    *block = best_fit(a, size, stream, small);
    if (*block == GCK_NO_BLOCK) {
        status = from_device(a, size, stream, small, block);
    }
    if (status == GCK_OK && *block == GCK_NO_BLOCK && (status = give_back(a)) == GCK_OK) {
        status = from_device(a, size, stream, small, block);
    }
    if (status != GCK_OK || *block == GCK_NO_BLOCK || (status = reserve(a, 1)) != GCK_OK) {
        return status;
    }
    const int64_t rest = a->blocks[*block].size - size;
    if (small || a->expandable ? rest >= LEAST_BLOCK : rest > MOST_SMALL) {
        list(a, cut(a, *block, size));
    }
    a->blocks[*block].allocated = 1;
    a->allocated += a->blocks[*block].size;
    a->most_allocated = a->allocated > a->most_allocated ? a->allocated : a->most_allocated;
    return GCK_OK;
}

void gck_release(gck_caching_allocator *a, int32_t block)
{
    a->allocated -= a->blocks[block].size;
    a->blocks[block].allocated = 0;
    join_neighbours(a, block);
}
