/* caching_allocator.c: blocks, and the order in which they are looked for.
 *
 * A segment is a list of blocks, linked by place; a block is allocated or free.  The free ones of each
 * pool also lie in an array, sorted by size and address; few blocks are there at a time.  Between two
 * calls no two neighbours are free: whatever becomes free joins those beside it.  A block leaves its
 * array before its size or address changes, because these are what the array is sorted by. */
#include "planner/caching_allocator.h"

#include "planner/chain.h"

#include <stdlib.h>
#include <string.h>

#define MIB (INT64_C(1) << 20)

#define LEAST_BLOCK   512
#define MOST_SMALL    (1 * MIB)
#define SMALL_SEGMENT (2 * MIB)
#define LARGE_SEGMENT (20 * MIB)
#define LEAST_LARGE   (10 * MIB)             /* from here on a segment of its own  */
#define LARGE_UNIT    (2 * MIB)

enum { NO_BLOCK = -1, POOLS = 2, BLOCKS_EACH = 2 };   /* an allocation makes a segment and what is left of it */

/* A part of a segment. */
typedef struct {
    int64_t address, size;
    int32_t previous, next;                  /* its neighbours in the segment; `next` links unused places, too */
    uint8_t small, allocated;
} block;

/* Places of free blocks by size and address. */
typedef struct {
    int32_t *at;
    int64_t  n;
} order;

typedef struct {
    int64_t capacity;                        /* bytes that the device has for segments   */
    int64_t allocated, reserved;             /* bytes of blocks in use, and of segments  */
    int64_t most_allocated, most_reserved;
    block  *blocks;                          /* malloc, with room for the orders behind  */
    int32_t n;                               /* blocks used so far                       */
    int32_t unused;                          /* a place that was dropped, or NO_BLOCK    */
    order   orders[POOLS];                   /* of the large pool, and of the small one  */
    int64_t end;                             /* of all segments                          */
} allocator;

static int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

/* ---- blocks ---- */

/* The place of a new block. */
static int32_t add_block(allocator *a, const block *b)
{
    int32_t at = a->unused;

    if (at == NO_BLOCK) {
        at = a->n++;
    } else {
        a->unused = a->blocks[at].next;
    }
    a->blocks[at] = *b;
    return at;
}

static void drop_block(allocator *a, int32_t at)
{
    a->blocks[at].next = a->unused;
    a->unused = at;
}

static int is_before(const block *b, const block *other)
{
    return b->size != other->size ? b->size < other->size : b->address < other->address;
}

/* The number of free blocks of its pool that are before a block, which need not be among them. */
static int64_t find(const allocator *a, const block *b)
{
    const order *o = &a->orders[b->small];
    int64_t low = 0, high = o->n;

    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (is_before(&a->blocks[o->at[middle]], b)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static void list(allocator *a, int32_t at)
{
    order *o = &a->orders[a->blocks[at].small];
    const int64_t place = find(a, &a->blocks[at]);

    memmove(&o->at[place + 1], &o->at[place], (size_t)(o->n - place) * sizeof *o->at);
    o->at[place] = at;
    o->n++;
}

static void unlist(allocator *a, int32_t at)
{
    order *o = &a->orders[a->blocks[at].small];
    const int64_t place = find(a, &a->blocks[at]);

    o->n--;
    memmove(&o->at[place], &o->at[place + 1], (size_t)(o->n - place) * sizeof *o->at);
}

/* Leave the first bytes of a block, which is not listed, and list the block of the others. */
static void cut(allocator *a, int32_t at, int64_t bytes)
{
    block rest = a->blocks[at];

    rest.address += bytes;
    rest.size -= bytes;
    rest.previous = at;
    const int32_t place = add_block(a, &rest);
    if (rest.next != NO_BLOCK) {
        a->blocks[rest.next].previous = place;
    }
    a->blocks[at].size = bytes;
    a->blocks[at].next = place;
    list(a, place);
}

/* Join a block, which is not listed, with a neighbour that is free: the place of both. */
static int32_t join(allocator *a, int32_t at, int32_t neighbour)
{
    if (neighbour == NO_BLOCK || a->blocks[neighbour].allocated) {
        return at;
    }
    const int32_t first = a->blocks[at].next == neighbour ? at : neighbour, second = first == at ? neighbour : at;
    block *joined = &a->blocks[first];
    unlist(a, neighbour);
    joined->size += a->blocks[second].size;
    joined->next = a->blocks[second].next;
    if (joined->next != NO_BLOCK) {
        a->blocks[joined->next].previous = first;
    }
    drop_block(a, second);
    return first;
}

/* ---- the device ---- */

/* Give back the segments that are one free block. */
static void release_unused(allocator *a)
{
    for (int pool = 0; pool < POOLS; pool++) {
        order *o = &a->orders[pool];
        int64_t left = 0;
        for (int64_t i = 0; i < o->n; i++) {
            const block *b = &a->blocks[o->at[i]];
            if (b->previous == NO_BLOCK && b->next == NO_BLOCK) {
                a->reserved -= b->size;
                drop_block(a, o->at[i]);
            } else {
                o->at[left++] = o->at[i];
            }
        }
        o->n = left;
    }
}

/* A block of the device; NO_BLOCK when that has too little left. */
static int32_t from_device(allocator *a, int64_t size, int small)
{
    const int64_t bytes = small ? SMALL_SEGMENT : size < LEAST_LARGE ? LARGE_SEGMENT : round_up(size, LARGE_UNIT);

    if (bytes > a->capacity - a->reserved) {
        return NO_BLOCK;
    }
    a->reserved += bytes;
    a->most_reserved = gck_larger(a->most_reserved, a->reserved);
    a->end += bytes;
    return add_block(a, &(block){a->end - bytes, bytes, NO_BLOCK, NO_BLOCK, (uint8_t)small, 0});
}

/* ---- allocations ---- */

/* The free block that fits best, unlisted; or NO_BLOCK. */
static int32_t best_fit(allocator *a, int64_t size, int small)
{
    const order *o = &a->orders[small];
    const int64_t i = find(a, &(block){.size = size, .small = (uint8_t)small});
    const int32_t found = i < o->n ? o->at[i] : NO_BLOCK;

    if (found != NO_BLOCK) {
        unlist(a, found);
    }
    return found;
}

/* The block of an allocation; NO_BLOCK if the capacity is too small. */
static int32_t allocate(allocator *a, int64_t bytes)
{
    const int64_t size = round_up(bytes, LEAST_BLOCK);
    const int small = size <= MOST_SMALL;
    int32_t found = best_fit(a, size, small);

    found = found == NO_BLOCK ? from_device(a, size, small) : found;
    if (found == NO_BLOCK) {
        release_unused(a);
        found = from_device(a, size, small);
    }
    if (found == NO_BLOCK) {
        return NO_BLOCK;
    }
    const int64_t rest = a->blocks[found].size - size;
    if (small ? rest >= LEAST_BLOCK : rest > MOST_SMALL) {
        cut(a, found, size);
    }
    a->blocks[found].allocated = 1;
    a->allocated += a->blocks[found].size;
    a->most_allocated = gck_larger(a->most_allocated, a->allocated);
    return found;
}

static void release(allocator *a, int32_t at)
{
    a->allocated -= a->blocks[at].size;
    a->blocks[at].allocated = 0;
    at = join(a, at, a->blocks[at].previous);
    at = join(a, at, a->blocks[at].next);
    list(a, at);
}

/* ---- traces ---- */

int gck_memory_trace_check(const gck_memory_trace *trace)
{
    int64_t sum = 0;
    int status = GCK_OK;
    char *alive = gck_planner_memory(trace->n, 1);

    if (alive == NULL) {
        return GCK_E_MEMORY;
    }
    memset(alive, 0, (size_t)trace->n);
    for (int64_t i = 0; i < trace->n && status == GCK_OK; i++) {
        const gck_memory_change *change = &trace->changes[i];
        if (change->bytes < 0 || change->bytes >= GCK_LIMIT - sum || change->name < 0 || change->name >= trace->n
            || alive[change->name] != (change->bytes == 0)) {
            status = GCK_E_RANGE;
        } else {
            sum += change->bytes;
            alive[change->name] = change->bytes > 0;
        }
    }
    free(alive);
    return status;
}

/* What is allocated under a name: its block, and the bytes that were asked for. */
typedef struct {
    int64_t bytes;
    int32_t block;
} holding;

/* Play a trace in memory for its blocks and holdings; return whether the capacity is enough. */
static int play(const gck_memory_trace *trace, block *blocks, holding *holdings, int64_t capacity, gck_memory_use *use)
{
    const int64_t most = BLOCKS_EACH * trace->n;
    int32_t *at = (int32_t *)(blocks + most);
    allocator a = {.capacity = capacity, .unused = NO_BLOCK, .blocks = blocks, .orders = {{at, 0}, {at + most, 0}}};
    int64_t requested = 0;

    use->requested = 0;
    for (int64_t i = 0; i < trace->n; i++) {
        const gck_memory_change *change = &trace->changes[i];
        holding *of = &holdings[change->name];
        if (change->bytes == 0) {
            requested -= of->bytes;
            release(&a, of->block);
            continue;
        }
        *of = (holding){change->bytes, allocate(&a, change->bytes)};
        if (of->block == NO_BLOCK) {
            return 0;
        }
        requested += change->bytes;
        use->requested = gck_larger(use->requested, requested);
    }
    use->allocated = a.most_allocated;
    use->reserved = a.most_reserved;
    return 1;
}

int gck_memory_trace_needed(const gck_memory_trace *trace, gck_memory_use *use)
{
    block *blocks = gck_planner_memory(BLOCKS_EACH * trace->n, sizeof *blocks + POOLS * sizeof(int32_t));
    holding *holdings = gck_planner_memory(trace->n, sizeof *holdings);
    const int has_memory = blocks != NULL && holdings != NULL;

    if (has_memory) {
        play(trace, blocks, holdings, INT64_MAX, use);
        gck_memory_use less = *use;
        do {
            use->needed = less.reserved;
        } while (less.reserved > 0 && play(trace, blocks, holdings, less.reserved - 1, &less));
    }
    free(blocks);
    free(holdings);
    return has_memory ? GCK_OK : GCK_E_MEMORY;
}
