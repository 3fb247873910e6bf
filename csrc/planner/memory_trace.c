/* memory_trace.c: a trace through the model of torch's allocator. */
#include "planner/memory_trace.h"

#include "planner/caching_allocator.h"
#include "planner/chain.h"

#include <stdlib.h>

#define LIMIT (INT64_C(1) << 60)

int gck_memory_trace_check(const gck_memory_trace *trace)
{
    int64_t sum = 0;
    int status = GCK_OK;
    char *alive = gck_planner_memory(trace->n, 1);

    if (alive == NULL) {
        return GCK_E_MEMORY;
    }
    for (int64_t i = 0; i < trace->n; i++) {
        alive[i] = 0;
    }
    for (int64_t i = 0; i < trace->n && status == GCK_OK; i++) {
        const gck_memory_change *change = &trace->changes[i];
        if (change->bytes < 0 || change->bytes >= LIMIT - sum || change->name < 0 || change->name >= trace->n
            || change->stream < 0 || change->stream >= GCK_MOST_STREAMS
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

int gck_memory_trace_play(const gck_memory_trace *trace, int64_t capacity, gck_memory_use *use)
{
    holding *holdings = gck_planner_memory(trace->n, sizeof *holdings);
    int64_t requested = 0;
    int status = holdings != NULL ? GCK_OK : GCK_E_MEMORY;
    gck_caching_allocator allocator;

    gck_caching_allocator_init(&allocator, capacity, trace->expandable);
    *use = (gck_memory_use){.completed = status == GCK_OK};
    for (int64_t i = 0; i < trace->n && status == GCK_OK && use->completed; i++) {
        const gck_memory_change *change = &trace->changes[i];
        holding *of = &holdings[change->name];
        if (change->bytes == 0) {
            requested -= of->bytes;
            gck_release(&allocator, of->block);
            continue;
        }
        *of = (holding){change->bytes, GCK_NO_BLOCK};
        status = gck_allocate(&allocator, change->bytes, (int32_t)change->stream, &of->block);
        use->completed = of->block != GCK_NO_BLOCK;
        requested += change->bytes;
        use->requested = requested > use->requested ? requested : use->requested;
    }
    use->allocated = allocator.most_allocated;
    use->reserved = allocator.most_reserved;
    gck_caching_allocator_free(&allocator);
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
