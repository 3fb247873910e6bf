/* lower_bound.c: the best time if bytes are rounded in favour of it.
 *
 * A grid of slack holds for each bucket a time that no plan with a slack in that bucket goes below.
 * A step to the next region's grid rounds the slack up to the end of its bucket.  The grids are laid
 * so that the plan in question is always at such an end: it gains nothing, and others only where
 * they differ from it.
 *
 * Errors are priced: for any price p >= 0 of an error, the least sum of time + p * error, less p *
 * error budget, is a bound. */
#include "planner/lower_bound.h"

#include "planner/buckets.h"
#include "planner/prices.h"

#include <stdlib.h>

enum { FINER = 2 };                          /* as many buckets with errors */
#define ENOUGH (INT64_C(1) << 60)            /* a budget beyond all sums */

typedef struct {
    const gck_front *front;
    int64_t          budget, most_error;     /* as gck_priced_options() has it */
    int64_t          width, most;            /* of a bucket, in bytes; buckets */
    const uint32_t  *choices;                /* of the plan */
    int64_t         *slack;                  /* of the plan at each region */
    int64_t         *least, *greatest;       /* slack of any plan at each region */
    int64_t         *low, *high;             /* the first and the last slack that is looked at */
    gck_option      *options;
    gck_move        *moves;
    gck_buckets      now, next;              /* the bounds of this region and of the next */
} bounds;

/* Set the slack that plans may have within the budget, before each region and after the last. */
static void find_slack(bounds *b)
{
    const gck_chain *chain = b->front->chain;

    b->slack[0] = b->least[0] = b->greatest[0] = b->budget;
    for (int64_t l = 0; l < chain->regions; l++) {
        int64_t least = INT64_MAX, most = INT64_MIN;
        for (int64_t at = l * chain->options; at < (l + 1) * chain->options; at++) {
            if (chain->need[at] != GCK_UNAVAILABLE) {
                least = gck_smaller(chain->kept[at], least);
                most = gck_larger(chain->kept[at], most);
            }
        }
        b->slack[l + 1] = b->slack[l] - chain->kept[l * chain->options + b->choices[l]];
        b->least[l + 1] = b->least[l] - most;
        b->greatest[l + 1] = b->greatest[l] - least;
    }
}

/* Set the slack between which the grid of each region up to `from` lies, and the width of a
 * bucket. */
static void find_grids(bounds *b, const gck_labels *labels, int64_t from, gck_price price)
{
    int64_t first = labels->at[0].bytes, last = labels->at[labels->n - 1].bytes, range = 0;

    for (int64_t l = from;; l--) {
        b->low[l] = gck_larger(first, b->least[l]);
        b->high[l] = gck_larger(b->low[l], gck_smaller(last, b->greatest[l]));
        range = gck_larger(range, b->high[l] - b->low[l]);
        if (l == 0) {
            break;
        }
        const int n = gck_priced_options(b->front->chain, l - 1, price, b->most_error, b->options);
        int64_t new_first = INT64_MAX, new_last = INT64_MAX, time = INT64_MAX;
        for (int o = 0; o < n; o++) {
            const gck_option *option = &b->options[o];
            const int64_t bytes = gck_larger(last + option->kept, option->need);
            new_first = gck_smaller(new_first, gck_larger(first + option->kept, option->need));
            if (option->time < time || (option->time == time && bytes < new_last)) {
                new_last = bytes;
                time = option->time;
            }
        }
        first = new_first;
        last = new_last;
    }
    b->width = range / (b->most - 1) + 1;
}

/* Lay the buckets of a region: the first is the one that holds `low`, and the plan's slack is at
 * the end of one. */
static void lay(const bounds *b, int64_t region, gck_buckets *buckets)
{
    const int64_t end = b->slack[region] - gck_floor_div(b->slack[region] - b->low[region], b->width) * b->width;

    buckets->first = end - b->width + 1;
    buckets->n = gck_larger(gck_ceil_div(b->high[region] - end, b->width), 0) + 1;
}

/* The bound at a price, from the labels of region `from` on; GCK_NEVER: no plan. */
static int64_t bound_at(bounds *b, const gck_labels *labels, int64_t from, gck_price price)
{
    find_grids(b, labels, from, price);
    lay(b, from, &b->next);
    b->next.time[0] = GCK_NEVER;
    for (int64_t i = 0, at = 0; i < b->next.n; i++) {
        while (at < labels->n && labels->at[at].bytes < b->next.first + (i + 1) * b->width) {
            at++;
        }
        b->next.time[i + 1] = at > 0 ? labels->at[at - 1].time : GCK_NEVER;
    }
    for (int64_t l = from - 1; l >= 0; l--) {
        const gck_buckets done = b->next;
        lay(b, l, &b->now);
        const int n = gck_priced_options(b->front->chain, l, price, b->most_error, b->options);
        gck_buckets_bound(&b->next, b->options, n, b->width, b->moves, &b->now);
        b->next = b->now;
        b->now = done;
    }
    return b->next.time[1 + gck_smaller((b->budget - b->next.first) / b->width, b->next.n - 1)];
}

int gck_lower_bound(const gck_front *front, const gck_solution *plan, int64_t budget, int64_t error_budget,
                    gck_price price, int64_t *bound)
{
    const gck_chain *chain = front->chain;
    const int64_t regions = chain->regions;
    const gck_label end = {.bytes = chain->last_need};
    const gck_labels ends = {(gck_label *)&end, 1, 1};
    bounds b = {.front = front, .budget = gck_smaller(budget, ENOUGH), .choices = plan->choices,
                .most = (chain->error != NULL ? FINER : 1) * (front->buckets + front->buckets / 2)};
    int64_t *memory = NULL, least, most;
    int status = GCK_OK;

    if (front->exact_from == 0) {
        *bound = plan->time;
        return GCK_OK;
    }
    memory = gck_planner_memory(5 * (regions + 1), sizeof *memory);
    b.options = gck_planner_memory(chain->options, sizeof *b.options);
    b.moves = gck_planner_memory(chain->options, sizeof *b.moves);
    b.now.time = gck_planner_memory(b.most + 2, sizeof *b.now.time);
    b.next.time = gck_planner_memory(b.most + 2, sizeof *b.next.time);
    if (memory == NULL || b.options == NULL || b.moves == NULL || b.now.time == NULL || b.next.time == NULL) {
        status = GCK_E_MEMORY;
        goto exit;
    }
    b.slack = memory;
    b.least = b.slack + regions + 1;
    b.greatest = b.least + regions + 1;
    b.low = b.greatest + regions + 1;
    b.high = b.low + regions + 1;
    find_slack(&b);
    if (chain->error == NULL) {
        *bound = bound_at(&b, &front->exact, front->exact_from, price);
    } else {
        gck_error_sums(chain, &least, &most);
        b.most_error = error_budget - least;
        *bound = bound_at(&b, &ends, regions, price) - gck_priced(price, error_budget, 1);
    }
    *bound = gck_smaller(plan->time, *bound);
exit:
    free(memory);
    free(b.options);
    free(b.moves);
    free(b.now.time);
    free(b.next.time);
    return status;
}
