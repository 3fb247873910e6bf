/* caching_allocator.c: blocks, and the order in which they are looked for.
 *
 * A segment is a list of blocks, linked by place; a block is allocated, free (it has memory), or
 * unmapped (addresses of an expandable segment that have none).  What is not allocated also lies in
 * one of four sorted arrays, one for each pool and kind; few blocks are there at a time.  Between two
 * calls no two neighbours are free, and no two unmapped: whatever becomes either joins its like.  A
 * block leaves its array before its size, address or kind changes, because these are what the array
 * is sorted by. */
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
#define ADDRESSES     (INT64_C(1) << 62)     /* of an expandable segment: more than all allocations and their pages */

enum { NO_BLOCK = -1, ORDERS = 4, MOST_STREAMS = 1 << 16 };

/* A part of a segment. */
typedef struct {
    int64_t address, size;
    int32_t previous, next;                  /* its neighbours in the segment; `next` links unused places, too */
    int32_t stream;
    uint8_t small, allocated, mapped;
} block;

/* Places of blocks: unmapped ones by stream and address, free ones by stream, size and address. */
typedef struct {
    int32_t *at;
    int64_t  n;
} order;

typedef struct {
    int64_t capacity;                        /* bytes that the device has for segments   */
    int     expandable;
    int64_t allocated, reserved;             /* bytes of blocks in use, and of segments  */
    int64_t most_allocated, most_reserved;
    block  *blocks;                          /* malloc, with room for the orders behind  */
    int64_t n, room;                         /* blocks used so far, and room for them    */
    int32_t unused;                          /* a place that was dropped, or NO_BLOCK    */
    order   orders[ORDERS];                  /* place 2 * mapped + small                 */
    int64_t end;                             /* of all segments that do not expand       */
} allocator;

static int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

static int64_t page_of(const block *b) { return b->small ? SMALL_SEGMENT : LARGE_SEGMENT; }

/* ---- blocks ---- */

/* Make room for so many more blocks.  GCK_OK or GCK_E_MEMORY. */
static int make_room(allocator *a, int64_t more)
{
    const int64_t room = 2 * (a->n + more);
    block *blocks;

    if (a->n + more <= a->room) {
        return GCK_OK;
    }
    if ((blocks = gck_planner_memory(room, sizeof *blocks + ORDERS * sizeof(int32_t))) == NULL) {
        return GCK_E_MEMORY;
    }
    int32_t *at = (int32_t *)(blocks + room);
    for (int i = 0; i < ORDERS && a->n > 0; i++) {
        memcpy(at + i * room, a->orders[i].at, (size_t)a->orders[i].n * sizeof *at);
    }
    for (int i = 0; i < ORDERS; i++) {
        a->orders[i].at = at + i * room;
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
static int32_t add_block(allocator *a, const block *b)
{
    int32_t at = a->unused;

    if (at == NO_BLOCK) {
        at = (int32_t)a->n++;
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

static order *order_of(allocator *a, const block *b) { return &a->orders[2 * b->mapped + b->small]; }

static int is_before(const block *b, const block *other)
{
    if (b->stream != other->stream) {
        return b->stream < other->stream;
    }
    return b->mapped && b->size != other->size ? b->size < other->size : b->address < other->address;
}

/* The number of blocks of its order that are before a block, which need not be among them. */
static int64_t find(allocator *a, const block *b)
{
    const order *o = order_of(a, b);
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
    order *o = order_of(a, &a->blocks[at]);
    const int64_t place = find(a, &a->blocks[at]);

    memmove(&o->at[place + 1], &o->at[place], (size_t)(o->n - place) * sizeof *o->at);
    o->at[place] = at;
    o->n++;
}

static void unlist(allocator *a, int32_t at)
{
    order *o = order_of(a, &a->blocks[at]);
    const int64_t place = find(a, &a->blocks[at]);

    o->n--;
    memmove(&o->at[place], &o->at[place + 1], (size_t)(o->n - place) * sizeof *o->at);
}

/* Leave the first bytes of a block, which is not listed: the place of the block of the others. */
static int32_t cut(allocator *a, int32_t at, int64_t bytes)
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
    return place;
}

/* Join a block, which is not listed, with a neighbour of the same kind: the place of both. */
static int32_t join(allocator *a, int32_t at, int32_t neighbour)
{
    if (neighbour == NO_BLOCK || a->blocks[neighbour].allocated
        || a->blocks[neighbour].mapped != a->blocks[at].mapped) {
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

/* List a block that is free or unmapped now, joined with its neighbours: the place of all. */
static int32_t join_neighbours(allocator *a, int32_t at)
{
    at = join(a, at, a->blocks[at].previous);
    at = join(a, at, a->blocks[at].next);
    list(a, at);
    return at;
}

/* ---- the device ---- */

/* 1 when the device had so many bytes left. */
static int reserve(allocator *a, int64_t bytes)
{
    if (bytes > a->capacity - a->reserved) {
        return 0;
    }
    a->reserved += bytes;
    a->most_reserved = a->reserved > a->most_reserved ? a->reserved : a->most_reserved;
    return 1;
}

/* Give back what is free and whole: a segment, or pages.  GCK_OK or GCK_E_MEMORY. */
static int release_if_whole(allocator *a, int32_t at, int *changed)
{
    const block b = a->blocks[at];
    const int64_t page = page_of(&b), from = a->expandable ? round_up(b.address, page) : b.address;
    const int64_t end = a->expandable ? (b.address + b.size) / page * page : b.address + b.size;

    *changed = a->expandable ? from < end : b.previous == NO_BLOCK && b.next == NO_BLOCK;
    if (!*changed) {
        return GCK_OK;
    }
    if (make_room(a, 2) != GCK_OK) {
        return GCK_E_MEMORY;
    }
    unlist(a, at);
    a->reserved -= end - from;
    if (!a->expandable) {
        drop_block(a, at);
        return GCK_OK;
    }
    if (from > b.address) {
        const int32_t whole = cut(a, at, from - b.address);
        list(a, at);
        at = whole;
    }
    if (end < b.address + b.size) {
        list(a, cut(a, at, end - from));
    }
    a->blocks[at].mapped = 0;
    join_neighbours(a, at);
    return GCK_OK;
}

static int release_unused(allocator *a)
{
    for (int small = 0; small < 2; small++) {
        const order *free_blocks = &a->orders[2 + small];
        for (int64_t i = 0; i < free_blocks->n;) {
            int changed;
            if (release_if_whole(a, free_blocks->at[i], &changed) != GCK_OK) {
                return GCK_E_MEMORY;
            }
            i = changed ? 0 : i + 1;
        }
    }
    return GCK_OK;
}

/* ---- expandable segments ---- */

static int64_t size_when_grown(const allocator *a, int32_t at)
{
    const int32_t next = a->blocks[at].next;

    return a->blocks[at].size + (next != NO_BLOCK && !a->blocks[next].mapped ? a->blocks[next].size : 0);
}

static int is_room(const allocator *a, int32_t at, int64_t size)
{
    for (; size > 0 && at != NO_BLOCK && !a->blocks[at].allocated; at = a->blocks[at].next) {
        size -= a->blocks[at].size;
    }
    return size <= 0;
}

/* The lowest block at which pages make room: free, or unmapped.  There is room for a block more. */
static int32_t lowest_room(allocator *a, int64_t size, int32_t stream, int small)
{
    /* Segments share addresses: orders tell streams and pools apart, and each has one segment. */
    const block whole = {.size = ADDRESSES, .previous = NO_BLOCK, .next = NO_BLOCK, .stream = stream,
                         .small = (uint8_t)small};
    const order *unmapped = order_of(a, &whole);

    for (int64_t i = find(a, &whole); i < unmapped->n && a->blocks[unmapped->at[i]].stream == stream; i++) {
        const int32_t at = unmapped->at[i], before = a->blocks[at].previous;
        const int32_t first = before != NO_BLOCK && !a->blocks[before].allocated ? before : at;
        if (is_room(a, first, size)) {
            return first;
        }
    }
    const int32_t at = add_block(a, &whole);
    list(a, at);
    return at;
}

/* *found: an unlisted block of at least this size, or NO_BLOCK: the device has too little left.
 * GCK_OK or GCK_E_MEMORY. */
static int expand(allocator *a, int64_t size, int32_t stream, int small, int32_t *found)
{
    int status = make_room(a, 1);
    int32_t at = status == GCK_OK ? lowest_room(a, size, stream, small) : NO_BLOCK;

    while (status == GCK_OK && (!a->blocks[at].mapped || a->blocks[at].size < size)) {
        const int64_t has = a->blocks[at].mapped ? a->blocks[at].size : 0;
        const int32_t next = has > 0 ? a->blocks[at].next : at;       /* the unmapped one */
        const int64_t pages = round_up(size - has, page_of(&a->blocks[next])), room = a->blocks[next].size;
        const int64_t bytes = pages < room ? pages : room;
        if ((status = make_room(a, 1)) != GCK_OK || !reserve(a, bytes)) {
            return status;
        }
        unlist(a, next);
        if (bytes < room) {
            list(a, cut(a, next, bytes));
        }
        a->blocks[next].mapped = 1;
        at = join_neighbours(a, next);
    }
    if (status == GCK_OK) {
        unlist(a, at);
        *found = at;
    }
    return status;
}

/* ---- allocations ---- */

/* The free block that fits best, unlisted; or NO_BLOCK. */
static int32_t best_fit(allocator *a, int64_t size, int32_t stream, int small)
{
    const block least = {.size = size, .stream = stream, .small = (uint8_t)small, .mapped = 1};
    const order *o = order_of(a, &least);
    int64_t i = find(a, &least);

    if (i == o->n || a->blocks[o->at[i]].stream != stream) {
        return NO_BLOCK;
    }
    while (a->expandable && i + 1 < o->n && a->blocks[o->at[i + 1]].stream == stream
           && size_when_grown(a, o->at[i + 1]) < size_when_grown(a, o->at[i])) {
        i++;
    }
    const int32_t found = o->at[i];
    unlist(a, found);
    return found;
}

/* *found: a block of the device, unlisted; unchanged when that has too little left. */
static int from_device(allocator *a, int64_t size, int32_t stream, int small, int32_t *found)
{
    const int64_t bytes = small ? SMALL_SEGMENT : size < LEAST_LARGE ? LARGE_SEGMENT : round_up(size, LARGE_UNIT);

    if (a->expandable) {
        return expand(a, size, stream, small, found);
    }
    if (make_room(a, 1) != GCK_OK) {
        return GCK_E_MEMORY;
    }
    if (reserve(a, bytes)) {
        *found = add_block(a, &(block){a->end, bytes, NO_BLOCK, NO_BLOCK, stream, (uint8_t)small, 0, 1});
        a->end += bytes;
    }
    return GCK_OK;
}

/* Allocate bytes on a stream: *found, or NO_BLOCK if the capacity is too small.  GCK_OK or
 * GCK_E_MEMORY. */
static int allocate(allocator *a, int64_t bytes, int32_t stream, int32_t *found)
{
    const int64_t size = round_up(bytes, LEAST_BLOCK);
    const int small = size <= MOST_SMALL;
    int status = GCK_OK;

    *found = best_fit(a, size, stream, small);
    if (*found == NO_BLOCK) {
        status = from_device(a, size, stream, small, found);
    }
    if (status == GCK_OK && *found == NO_BLOCK && (status = release_unused(a)) == GCK_OK) {
        status = from_device(a, size, stream, small, found);
    }
    if (status != GCK_OK || *found == NO_BLOCK || (status = make_room(a, 1)) != GCK_OK) {
        return status;
    }
    const int64_t rest = a->blocks[*found].size - size;
    if (small || a->expandable ? rest >= LEAST_BLOCK : rest > MOST_SMALL) {
        list(a, cut(a, *found, size));
    }
    a->blocks[*found].allocated = 1;
    a->allocated += a->blocks[*found].size;
    a->most_allocated = a->allocated > a->most_allocated ? a->allocated : a->most_allocated;
    return GCK_OK;
}

static void release(allocator *a, int32_t at)
{
    a->allocated -= a->blocks[at].size;
    a->blocks[at].allocated = 0;
    join_neighbours(a, at);
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
            || change->stream < 0 || change->stream >= MOST_STREAMS || alive[change->name] != (change->bytes == 0)) {
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

int gck_memory_trace_play(const gck_memory_trace *trace, int64_t capacity, gck_memory_use *use)
{
    holding *holdings = gck_planner_memory(trace->n, sizeof *holdings);
    allocator a = {.capacity = capacity, .expandable = trace->expandable, .unused = NO_BLOCK};
    int64_t requested = 0;
    int status = holdings != NULL ? GCK_OK : GCK_E_MEMORY;

    *use = (gck_memory_use){.completed = 1};
    for (int64_t i = 0; i < trace->n && status == GCK_OK && use->completed; i++) {
        const gck_memory_change *change = &trace->changes[i];
        holding *of = &holdings[change->name];
        if (change->bytes == 0) {
            requested -= of->bytes;
            release(&a, of->block);
            continue;
        }
        of->bytes = change->bytes;
        status = allocate(&a, change->bytes, (int32_t)change->stream, &of->block);
        use->completed = of->block != NO_BLOCK;
        requested += change->bytes;
        use->requested = requested > use->requested ? requested : use->requested;
    }
    use->allocated = a.most_allocated;
    use->reserved = a.most_reserved;
    free(a.blocks);
    free(holdings);
    return status;
}

int gck_memory_trace_needed(const gck_memory_trace *trace, gck_memory_use *use, int64_t *needed)
{
    int status = gck_memory_trace_play(trace, INT64_MAX, use);
    gck_memory_use less = *use;

    *needed = less.reserved;
    while (status == GCK_OK && less.completed && less.reserved > 0) {
        *needed = less.reserved;
        status = gck_memory_trace_play(trace, less.reserved - 1, &less);
    }
    return status;
}
