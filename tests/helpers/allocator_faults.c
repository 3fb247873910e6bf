/* allocator_faults.c: the model of the caching allocator over a malloc that can be made to fail.
 *
 * For random traces each allocation fails in turn: the status says so, and nothing is left. */
#include "planner/memory_trace.h"

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

static uint64_t state = 1;

static int64_t draw(int64_t end)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 20) % (uint64_t)end);
}

enum { CHANGES = 120 };

static int64_t make(gck_memory_change *changes)
{
    int64_t living[CHANGES], n = 0;

    for (int64_t i = 0; i < CHANGES; i++) {
        if (n > 0 && draw(2)) {
            const int64_t at = draw(n);
            changes[i] = (gck_memory_change){0, living[at], 0};
            living[at] = living[--n];
        } else {
            changes[i] = (gck_memory_change){1 + draw(INT64_C(1) << (10 + draw(17))), i, draw(2)};
            living[n++] = i;
        }
    }
    return CHANGES;
}

int main(void)
{
    gck_memory_change changes[CHANGES];
    gck_memory_use use;
    int64_t needed;

    for (int seed = 0; seed < 200; seed++) {
        const gck_memory_trace trace = {changes, make(changes), seed % 2};
        int status = GCK_E_MEMORY;
        for (failing = 1; status == GCK_E_MEMORY; failing++) {
            allocations = 0;
            status = gck_memory_trace_check(&trace);
            status = status == GCK_OK ? gck_memory_trace_needed(&trace, &use, &needed) : status;
            if ((status != GCK_OK && status != GCK_E_MEMORY) || alive != 0
                || (status == GCK_OK) != (allocations < failing)) {
                printf("trace %d, failing %ld: status %d, %ld left\n", seed, failing, status, alive);
                return 1;
            }
        }
    }
    printf("200 traces, every allocation failed once\n");
    return 0;
}
