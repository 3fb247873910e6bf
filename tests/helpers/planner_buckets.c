/* planner_buckets.c: csrc/planner/buckets.c, built twice, finds the same in random grids.
 *
 * plain_bound() and plain_choose() are built as for a CPU without AVX2.  Prints how many
 * grids there were. */
#include "planner/buckets.h"

#include <stdio.h>
#include <string.h>

enum { MOST = 700, OPTIONS = 9 };

void plain_bound(const gck_buckets *next, const gck_option *options, int n, int64_t width, gck_move *moves,
                 gck_buckets *now);
void plain_choose(const gck_buckets *next, const gck_option *options, int n, int shift, gck_move *moves,
                  gck_buckets *now, int64_t *ways);

static uint64_t state = 1;

static int64_t draw(int64_t least, int64_t most)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return least + (int64_t)((state >> 20) % (uint64_t)(most - least + 1));
}

/* A grid as slack_grid.c fills it: the label of a bucket may be of an earlier one. */
static void fill(gck_buckets *next, int shift, int64_t most_time)
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

int main(void)
{
    static int64_t lists[3][MOST + 2], times[2][2 * MOST + 1], ways[2][2 * MOST];
    static gck_option options[OPTIONS];
    static gck_move moves[OPTIONS];
    const int grids = 4000;

    for (int i = 0; i < grids; i++) {
        const int shift = (int)draw(0, 40), n = (int)draw(1, OPTIONS);
        const int64_t width = INT64_C(1) << shift;
        gck_buckets next = {.time = lists[0], .bytes = lists[1], .fall = lists[2]};
        fill(&next, shift, INT64_C(1) << draw(0, 40));
        for (int o = 0; o < n; o++) {
            const int64_t kept = draw(-40 * width, 300 * width);
            options[o] = (gck_option){kept, kept + draw(0, 200 * width), draw(0, INT64_C(1) << draw(0, 45)), 0, 0};
        }
        const gck_buckets now = {.first = next.first + draw(-20 * width, 300 * width), .n = draw(1, 2 * MOST)};
        for (int bound = 0; bound < 2; bound++) {
            gck_buckets here[2] = {now, now};
            memset(ways, 0, sizeof ways);
            here[0].time = times[0];
            here[1].time = times[1];
            if (bound) {
                gck_buckets_bound(&next, options, n, width, moves, &here[0]);
                plain_bound(&next, options, n, width, moves, &here[1]);
            } else {
                gck_buckets_choose(&next, options, n, shift, moves, &here[0], ways[0]);
                plain_choose(&next, options, n, shift, moves, &here[1], ways[1]);
            }
            if (memcmp(times[0], times[1], (size_t)(now.n + 1) * sizeof **times) != 0
                || memcmp(ways[0], ways[1], sizeof ways[0]) != 0) {
                printf("grid %d differs\n", i);
                return 1;
            }
        }
    }
    printf("%d grids\n", grids);
    return 0;
}
