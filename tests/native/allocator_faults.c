/* allocator_faults.c: the model of the caching allocator over a malloc that can be made to fail.
 *
 * For random traces each allocation fails in turn: the status says so, and nothing is left. */
#include "planner/caching_allocator.h"

#include "failing_malloc.h"

enum { CHANGES = 120 };

static int64_t make(gck_memory_change *changes)
{
    int64_t living[CHANGES], n = 0;

    for (int64_t i = 0; i < CHANGES; i++) {
        if (n > 0 && draw(0, 1)) {
            const int64_t at = draw(0, n - 1);
            changes[i] = (gck_memory_change){0, living[at]};
            living[at] = living[--n];
        } else {
            changes[i] = (gck_memory_change){1 + draw(0, (INT64_C(1) << (10 + draw(0, 16))) - 1), i};
            living[n++] = i;
        }
    }
    return CHANGES;
}

static int run(const void *trace)
{
    const int status = gck_memory_trace_check(trace);
    gck_memory_use use;

    return status == GCK_OK ? gck_memory_trace_needed(trace, &use) : status;
}

int main(void)
{
    gck_memory_change changes[CHANGES];

    for (int seed = 0; seed < 200; seed++) {
        const gck_memory_trace trace = {changes, make(changes)};
        if (!each_may_fail(run, &trace, GCK_E_MEMORY)) {
            return 1;
        }
    }
    printf("200 traces, every allocation failed once\n");
    return 0;
}
