/* priced_front.c: passes over the chain, one for each price of error. */
#include "planner/priced_front.h"

#include "planner/priced_pass.h"

#include <stdlib.h>
#include <string.h>

enum { OCTAVES = 7 };                        /* of prices below and above the typical one */

/* Append the labels of the last pass to the front's plans; GCK_OK or GCK_E_MEMORY. */
static int add_plans(gck_pricer *pricer)
{
    gck_front *front = pricer->front;
    const gck_labels *labels = &pricer->labels;
    int64_t at = front->plans.n;

    if (at + labels->n > front->plans.capacity) {
        const int64_t capacity = 2 * front->plans.capacity + labels->n;
        gck_end *ends = gck_planner_memory(capacity, sizeof *ends);
        if (ends == NULL) {
            return GCK_E_MEMORY;
        }
        if (at > 0) {
            memcpy(ends, front->ends, (size_t)at * sizeof *ends);
        }
        free(front->ends);
        front->ends = ends;
        if (gck_labels_reserve(&front->plans, capacity) != GCK_OK) {
            return GCK_E_MEMORY;
        }
    }
    for (int64_t i = 0; i < labels->n; i++, at++) {
        front->ends[at] = (gck_end){labels->at[i].from, (uint32_t)front->n_passes - 1};
        front->plans.at[at] = labels->at[i];
        front->plans.at[at].time = pricer->times[i];
        front->plans.at[at].from = (uint32_t)at;
    }
    front->plans.n = at;
    return GCK_OK;
}

static int run(gck_pricer *pricer, gck_price price)
{
    const int status = gck_pricer_run(pricer, price, price, 0, INT64_MAX);

    return status == GCK_OK ? add_plans(pricer) : status;
}

/* The sum over regions of the largest time. */
static int64_t most_time(const gck_chain *chain)
{
    int64_t sum = 0;

    for (int64_t l = 0; l < chain->regions; l++) {
        int64_t most = 0;
        for (int64_t at = l * chain->options; at < (l + 1) * chain->options; at++) {
            most = chain->need[at] != GCK_UNAVAILABLE ? gck_larger(most, chain->time[at]) : most;
        }
        sum += most;
    }
    return sum;
}

/* Octaves of prices about the ratio of all times to all errors. */
static int run_prices(gck_pricer *pricer)
{
    int64_t least, errors;
    int status = run(pricer, GCK_FREE);

    gck_error_sums(pricer->front->chain, &least, &errors);
    for (int octave = -OCTAVES; errors > 0 && octave <= OCTAVES && status == GCK_OK; octave++) {
        gck_price price = gck_price_of(most_time(pricer->front->chain) + 1, errors, errors);
        price.exponent += octave;
        if (gck_priced(price, errors, 1) < GCK_NEVER / 4) {
            status = run(pricer, price);
        }
    }
    return status;
}

int gck_priced_front_solve(gck_front *front)
{
    gck_pricer coarse, fine = {.front = NULL};
    gck_labels spare = {.at = NULL};
    int status = gck_pricer_init(&coarse, front, front->buckets / 4, front->range);

    if (status == GCK_OK && (status = gck_pricer_init(&fine, front, front->buckets, front->range)) == GCK_OK
        && (status = run_prices(&coarse)) == GCK_OK && (status = run(&fine, GCK_PRICELESS)) == GCK_OK) {
        status = gck_labels_sort_out(&front->plans, INT64_MAX - 1, &spare);
    }
    gck_pricer_free(&coarse);
    gck_pricer_free(&fine);
    gck_labels_free(&spare);
    return status;
}
