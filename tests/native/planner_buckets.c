/* planner_buckets.c: the inner loop of csrc/planner over random grids.
 *
 * Prints a digest of what it finds in each: built as for a CPU without AVX2 it prints the same. */
#include "planner/slack_grid.c"

#include "failing_malloc.h"

#include <string.h>

enum { MOST = 700, OPTIONS = 9 };

/* A grid as set_next() leaves it: the label of a bucket may be of an earlier one. */
static void draw_grid(gck_buckets *next, int shift, int64_t most_time)
{
    const int64_t width = INT64_C(1) << shift;

    next->first = draw(-width, 5 * width);
    next->n = draw(1, MOST);
    next->time[0] = GCK_NEVER;
    next->bytes[0] = -GCK_NEVER;
    next->time[next->n + 1] = next->fall[next->n + 1] = 0;
    for (int64_t b = 1; b <= next->n; b++) {
        const int new = b == 1 || draw(0, 3);
        next->bytes[b] = new ? next->first + (b - 1) * width + draw(0, width - 1) : next->bytes[b - 1];
    }
    for (int64_t b = next->n; b > 0; b--) {
        const int same = b < next->n && next->bytes[b] == next->bytes[b + 1];
        next->time[b] = next->time[b + 1] + (same ? 0 : draw(0, most_time));
        next->fall[b] = next->fall[b + 1] + draw(0, most_time / 8);
    }
    next->fall[0] = 0;
}

static uint64_t digest(uint64_t seen, const int64_t *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        seen = (seen ^ (uint64_t)values[i]) * 1099511628211u;
    }
    return seen;
}

int main(void)
{
    static int64_t lists[3][MOST + 2], times[2 * MOST + 1], ways[2 * MOST];
    static gck_option options[OPTIONS];
    static gck_move moves[OPTIONS];
    const int grids = 4000;

    for (int i = 0; i < grids; i++) {
        const int shift = (int)draw(0, 40), n = (int)draw(1, OPTIONS);
        const int64_t width = INT64_C(1) << shift;
        gck_buckets next = {.time = lists[0], .bytes = lists[1], .fall = lists[2]};
        draw_grid(&next, shift, INT64_C(1) << draw(0, 40));
        for (int o = 0; o < n; o++) {
            const int64_t kept = draw(-40 * width, 300 * width), need = kept + draw(0, 200 * width);
            options[o] = (gck_option){.kept = kept, .need = need, .time = draw(0, INT64_C(1) << draw(0, 45))};
        }
        gck_buckets now = {next.first + draw(-20 * width, 300 * width), draw(1, 2 * MOST), times, NULL, NULL};
        memset(ways, 0, sizeof ways);
        relax(&next, options, n, width, 0, moves, &now, NULL);
        uint64_t seen = digest(14695981039346656037u, times, now.n + 1);
        relax(&next, options, n, width, shift, moves, &now, ways);
        seen = digest(digest(seen, times, now.n + 1), ways, now.n);
        printf("%d %016llx\n", i, (unsigned long long)seen);
    }
    return 0;
}
