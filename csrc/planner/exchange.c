/* exchange.c: local search about a plan. */
#include "planner/exchange.h"

#include "planner/buckets.h"

#include <stdlib.h>

enum { SWEEPS = 8 };                         /* over all regions, at most */

/* What changes when a region takes another option. */
typedef struct {
    int64_t  kept, need, time, error;
    uint32_t option;
} change;

typedef struct {
    const gck_chain *chain;
    gck_solution    *plan;
    int64_t          error_left;
    int64_t         *left;                   /* of the budget at each region, and after the last one */
    int64_t         *later;                  /* the least of `left` from each region on              */
    change          *changes[2];             /* of two regions */
} exchange;

/* Set what is left of the bytes at each region. */
static void find_left(exchange *e, int64_t budget)
{
    const gck_chain *chain = e->chain;
    int64_t slack = budget;

    for (int64_t l = 0; l < chain->regions; l++) {
        const int64_t at = l * chain->options + e->plan->choices[l];
        e->left[l] = slack - chain->need[at];
        slack -= chain->kept[at];
    }
    e->left[chain->regions] = e->later[chain->regions] = slack - chain->last_need;
    for (int64_t l = chain->regions - 1; l >= 0; l--) {
        e->later[l] = gck_smaller(e->left[l], e->later[l + 1]);
    }
}

/* List the changes of a region that its own need and the error permit when others give `spare` of
 * it. */
static int list(const exchange *e, int64_t region, change *changes)
{
    const gck_chain *chain = e->chain;
    const int64_t first = region * chain->options, now = first + e->plan->choices[region];
    int n = 0;

    for (int64_t at = first; at < first + chain->options; at++) {
        if (at != now && chain->need[at] != GCK_UNAVAILABLE) {
            changes[n++] = (change){chain->kept[at] - chain->kept[now], chain->need[at] - chain->need[now],
                                    chain->time[at] - chain->time[now], chain->error[at] - chain->error[now],
                                    (uint32_t)(at - first)};
        }
    }
    return n;
}

static void apply(exchange *e, int64_t region, const change *made, int64_t budget)
{
    e->plan->choices[region] = made->option;
    e->plan->time += made->time;
    e->plan->error += made->error;
    e->error_left -= made->error;
    find_left(e, budget);
}

/* Make the best change of this region and of none or one of those up to `apart` after it; return
 * whether there is one. */
static int improve(exchange *e, int64_t region, int64_t apart, int64_t budget)
{
    const int64_t regions = e->chain->regions;
    change *a = e->changes[0], *b = e->changes[1], best[2] = {{.time = 0}, {.time = 0}};
    const int n = list(e, region, a);
    int64_t other = -1, least = 0, between = INT64_MAX; /* least `left` of the regions between the two */
    int found = 0;

    for (int i = 0; i < n; i++) {
        if (a[i].time < least && a[i].error <= e->error_left && a[i].need <= e->left[region]
            && a[i].kept <= e->later[region + 1]) {
            best[0] = a[i];
            least = a[i].time;
            found = 1;
        }
    }
    for (int64_t l = region + 1; l < regions && l <= region + apart; l++) {
        const int m = list(e, l, b);
        for (int i = 0; i < n; i++) {
            if (a[i].need > e->left[region] || a[i].kept > between) {
                continue;
            }
            for (int k = 0; k < m; k++) {
                if (a[i].time + b[k].time < least && a[i].error + b[k].error <= e->error_left
                    && a[i].kept + b[k].need <= e->left[l] && a[i].kept + b[k].kept <= e->later[l + 1]) {
                    best[0] = a[i];
                    best[1] = b[k];
                    least = a[i].time + b[k].time;
                    other = l;
                    found = 1;
                }
            }
        }
        between = gck_smaller(between, e->left[l]);
    }
    if (found) {
        apply(e, region, &best[0], budget);
    }
    if (other >= 0) {
        apply(e, other, &best[1], budget);
    }
    return found;
}

int gck_exchange(const gck_chain *chain, int64_t budget, int64_t error_budget, int64_t work, gck_solution *plan)
{
    const int64_t apart = gck_larger(work / chain->options, 1);
    exchange e = {.chain = chain, .plan = plan, .error_left = error_budget - plan->error};
    int status = GCK_E_MEMORY, again = 1;

    e.left = gck_planner_memory(chain->regions + 1, sizeof *e.left);
    e.later = gck_planner_memory(chain->regions + 1, sizeof *e.later);
    e.changes[0] = gck_planner_memory(chain->options, sizeof *e.changes[0]);
    e.changes[1] = gck_planner_memory(chain->options, sizeof *e.changes[1]);
    if (e.left != NULL && e.later != NULL && e.changes[0] != NULL && e.changes[1] != NULL) {
        find_left(&e, budget);
        for (int sweep = 0; sweep < SWEEPS && again; sweep++) {
            again = 0;
            for (int64_t l = 0; l < chain->regions; l++) {
                again |= improve(&e, l, apart, budget);
            }
        }
        plan->bytes = budget - e.later[0];
        status = GCK_OK;
    }
    free(e.left);
    free(e.later);
    free(e.changes[0]);
    free(e.changes[1]);
    return status;
}
