/* failing_malloc.h: for sources built with -Dmalloc=malloc_or_fail -Dfree=free_counted: allocation number `failing`
 * fails, and `alive` are not freed; and numbers of a seed. */
#ifndef FAILING_MALLOC_H
#define FAILING_MALLOC_H

#include <stdint.h>
#include <stdlib.h>

static long allocations, failing, alive;

void *malloc_or_fail(size_t size);
void free_counted(void *memory);

void *malloc_or_fail(size_t size)
{
    void *memory = ++allocations == failing ? NULL : malloc(size);

    alive += memory != NULL;
    return memory;
}

void free_counted(void *memory)
{
    alive -= memory != NULL;
    free(memory);
}

static uint64_t state = 1;

/* One of least .. most. */
static int64_t draw(int64_t least, int64_t most)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return least + (int64_t)((state >> 20) % (uint64_t)(most - least + 1));
}

#endif
