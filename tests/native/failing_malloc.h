/* failing_malloc.h: for sources built with -Dmalloc=malloc_or_fail -Dfree=free_counted: allocation number `failing`
 * fails, and `alive` are not freed; and numbers of a seed. */
#ifndef FAILING_MALLOC_H
#define FAILING_MALLOC_H

#include <stdint.h>
#include <stdio.h>
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

/* Call it again and again; in call k allocation number k fails, until none does.  1 where the status always says so, and
 * nothing is left. */
static inline int each_may_fail(int (*run)(const void *), const void *what, int no_memory)
{
    int status = no_memory;

    for (failing = 1; status == no_memory; failing++) {
        allocations = 0;
        status = run(what);
        if ((status != 0 && status != no_memory) || alive != 0 || (status == 0) != (allocations < failing)) {
            printf("failing %ld: status %d, %ld left\n", failing, status, alive);
            return 0;
        }
    }
    return 1;
}

static uint64_t state = 1;

/* One of least .. most. */
static int64_t draw(int64_t least, int64_t most)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return least + (int64_t)((state >> 20) % (uint64_t)(most - least + 1));
}

#endif
