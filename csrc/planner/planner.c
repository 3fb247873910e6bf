/* planner.c: from the last region to the first, the labels of all plans. */
#include "planner/planner.h"

#include "planner/lower_bound.h"
#include "planner/priced_front.h"
#include "planner/priced_plan.h"
#include "planner/slack_grid.h"

#include <stdlib.h>
#include <string.h>

/* What solving needs beside the front. */
typedef struct {
    gck_option    *options;                  /* of one region */
    gck_labels     next, labels, spare;      /* of the next region and of this one */
    int64_t        range;                    /* the most bytes between two labels of one region */
    gck_slack_grid grid;
    int            thinned;                  /* the grid is in use */
} solver;

/* Set s->range; return 0 if no budget is large enough. */
static int find_range(const gck_chain *chain, solver *s)
{
    int64_t first = chain->last_need, last = first;

    for (int64_t l = chain->regions - 1; l >= 0 && first != GCK_UNAVAILABLE; l--) {
        const int n = gck_chain_options(chain, l, s->options);
        int64_t least = GCK_UNAVAILABLE, most = GCK_UNAVAILABLE, time = INT64_MAX;
        for (int o = 0; o < n; o++) {
            const gck_option *option = &s->options[o];
            const int64_t low = first + option->kept, high = last + option->kept;
            const int64_t low_bytes = low > option->need ? low : option->need;
            const int64_t high_bytes = high > option->need ? high : option->need;
            least = low_bytes < least ? low_bytes : least;
            /* The last label is the fastest; with errors, others may have more bytes. */
            if (chain->error != NULL ? most == GCK_UNAVAILABLE || high_bytes > most
                                     : option->time < time || (option->time == time && high_bytes < most)) {
                most = high_bytes;
                time = option->time;
            }
        }
        first = least;
        last = most;
        s->range = n > 0 && last - first > s->range ? last - first : s->range;
    }
    return first != GCK_UNAVAILABLE;
}

/* Thin labels from region l on: the labels of the region after it are the last exact ones. */
static int begin_to_thin(gck_front *front, solver *s, int64_t l)
{
    const int status = gck_labels_reserve(&front->exact, s->next.n);

    if (status != GCK_OK) {
        return status;
    }
    memcpy(front->exact.at, s->next.at, (size_t)s->next.n * sizeof *s->next.at);
    front->exact.n = s->next.n;
    front->exact_from = l + 1;
    s->thinned = 1;
    return gck_slack_grid_init(&s->grid, front->chain->options, front->buckets, s->range);
}

/* Set s->labels to those of region l. */
static int extend(gck_front *front, solver *s, int64_t l)
{
    const int n = gck_chain_options(front->chain, l, s->options);
    int status;

    if (!s->thinned) {
        status = front->chain->error != NULL
                     ? gck_labels_extend_with_errors(&s->next, s->options, n, front->buckets, &s->labels, &s->spare)
                     : gck_labels_extend(&s->next, s->options, n, front->buckets, &s->labels, &s->spare);
        if (status != GCK_OK || s->labels.n <= front->buckets) {
            return status;
        }
        if ((status = begin_to_thin(front, s, l)) != GCK_OK || front->chain->error != NULL) {
            return status;
        }
    }
    return gck_slack_grid_extend(&s->grid, &s->next, s->options, n, &s->labels);
}

static int solve(gck_front *front, solver *s)
{
    const gck_chain *chain = front->chain;
    int status = gck_front_add_pass(front, chain->regions);

    if (status != GCK_OK || (status = gck_labels_reserve(&s->next, 1)) != GCK_OK) {
        return status;
    }
    s->next.at[s->next.n++] = (gck_label){.bytes = chain->last_need};
    for (int64_t l = chain->regions - 1; l >= 0; l--) {
        if ((status = extend(front, s, l)) != GCK_OK) {
            return status;
        }
        if (s->thinned && chain->error != NULL) {
            front->range = s->range;
            return gck_priced_front_solve(front);
        }
        if ((status = gck_front_keep_steps(front, l, &s->labels)) != GCK_OK) {
            return status;
        }
        const gck_labels used = s->next;
        s->next = s->labels;
        s->labels = used;
    }
    front->plans = s->next;
    s->next = (gck_labels){.at = NULL};
    return GCK_OK;
}

int gck_front_new(const gck_chain *chain, int64_t buckets, gck_front **out)
{
    solver s = {.range = 0};
    gck_front *front = NULL;
    int status = gck_chain_check(chain);

    *out = NULL;
    if (status == GCK_OK && (buckets < GCK_LEAST_BUCKETS || buckets > GCK_MOST_BUCKETS)) {
        status = GCK_E_RANGE;
    }
    if (status != GCK_OK) {
        goto exit;
    }
    status = GCK_E_MEMORY;
    if ((front = gck_planner_memory(1, sizeof *front)) == NULL) {
        goto exit;
    }
    *front = (gck_front){.chain = chain, .buckets = buckets};
    if ((s.options = gck_planner_memory(chain->options, sizeof *s.options)) == NULL) {
        goto exit;
    }
    status = find_range(chain, &s) ? solve(front, &s) : GCK_OK;
    if (status == GCK_OK) {
        *out = front;
        front = NULL;
    }
exit:
    gck_front_free(front);
    gck_slack_grid_free(&s.grid);
    gck_labels_free(&s.next);
    gck_labels_free(&s.labels);
    gck_labels_free(&s.spare);
    free(s.options);
    return status;
}

int gck_front_plan(gck_front *front, int64_t budget, int64_t error_budget, gck_solution *plan, int64_t *bound)
{
    const int64_t found = gck_front_find(front, budget, error_budget);
    gck_price price = GCK_FREE;
    int status = GCK_OK;

    if (found < 0) {
        plan->found = 0;
        return GCK_OK;
    }
    plan->found = 1;
    plan->bytes = front->plans.at[found].bytes;
    plan->error = front->plans.at[found].error;
    plan->time = front->plans.at[found].time;
    gck_front_choices(front, found, plan->choices);
    if (front->chain->error != NULL && front->exact_from > 0) {
        status = gck_priced_plan_improve(front, budget, error_budget, plan, &price);
    }
    return status == GCK_OK ? gck_lower_bound(front, plan, budget, error_budget, price, bound) : status;
}
