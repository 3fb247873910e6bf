/* space.c: a sorted array of free ranges. */
#include "offload/space.h"

#include <stdlib.h>
#include <string.h>

/* Room for the ranges that giving everything back can make, after one more call.  0 or -1. */
static int reserve(gck_space *space)
{
    const int64_t wanted = space->added + space->taken + 2;
    gck_range *free_ranges;

    if (wanted <= space->room) {
        return 0;
    }
    free_ranges = realloc(space->free, (size_t)(2 * wanted) * sizeof *free_ranges);
    if (free_ranges == NULL) {
        return -1;
    }
    space->free = free_ranges;
    space->room = 2 * wanted;
    return 0;
}

/* The number of ranges before an offset. */
static int64_t before(const gck_space *space, int64_t offset)
{
    int64_t low = 0, high = space->n;

    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (space->free[middle].offset < offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static void remove_range(gck_space *space, int64_t i)
{
    space->n--;
    memmove(space->free + i, space->free + i + 1, (size_t)(space->n - i) * sizeof *space->free);
}

/* Add it; neighbours join. */
static void add(gck_space *space, int64_t offset, int64_t nbytes)
{
    const int64_t i = before(space, offset);
    gck_range *left = i > 0 ? &space->free[i - 1] : NULL, *right = i < space->n ? &space->free[i] : NULL;
    const int joins_left = left != NULL && left->offset + left->size == offset;
    const int joins_right = right != NULL && offset + nbytes == right->offset;

    if (joins_left) {
        left->size += nbytes + (joins_right ? right->size : 0);
        if (joins_right) {
            remove_range(space, i);
        }
    } else if (joins_right) {
        *right = (gck_range){offset, right->size + nbytes};
    } else {
        memmove(space->free + i + 1, space->free + i, (size_t)(space->n - i) * sizeof *space->free);
        space->free[i] = (gck_range){offset, nbytes};
        space->n++;
    }
}

int gck_space_add(gck_space *space, int64_t offset, int64_t nbytes)
{
    if (reserve(space) < 0) {
        return -1;
    }
    space->added++;
    add(space, offset, nbytes);
    space->size = offset + nbytes > space->size ? offset + nbytes : space->size;
    return 0;
}

int64_t gck_space_take(gck_space *space, int64_t nbytes)
{
    int64_t best = -1, offset;

    if (reserve(space) < 0) {
        return -1;
    }
    for (int64_t i = 0; i < space->n; i++) {
        if (space->free[i].size >= nbytes && (best < 0 || space->free[i].size < space->free[best].size)) {
            best = i;
        }
    }
    if (best < 0) {
        return -1;
    }
    space->taken++;
    offset = space->free[best].offset;
    space->free[best].offset += nbytes;
    space->free[best].size -= nbytes;
    if (space->free[best].size == 0) {
        remove_range(space, best);
    }
    space->used += nbytes;
    return offset;
}

int64_t gck_space_take_more(gck_space *space, int64_t nbytes, int64_t more)
{
    const int64_t offset = gck_space_take(space, nbytes);
    return offset >= 0 || gck_space_add(space, space->size, nbytes > more ? nbytes : more) < 0 ? offset
         : gck_space_take(space, nbytes);
}

void gck_space_give(gck_space *space, int64_t offset, int64_t nbytes)
{
    add(space, offset, nbytes);
    space->taken--;
    space->used -= nbytes;
}

void gck_space_clear(gck_space *space)
{
    free(space->free);
    *space = (gck_space){.free = NULL};
}
