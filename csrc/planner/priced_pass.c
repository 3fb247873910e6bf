/* priced_pass.c: labels from the last exact ones to region 0, at a price of error. */
#include "planner/priced_pass.h"

#include <stdlib.h>

int gck_pricer_init(gck_pricer *pricer, gck_front *front, int64_t buckets, int64_t range)
{
    const int64_t most = gck_larger(buckets + 2, front->exact.n);
    int status;

    *pricer = (gck_pricer){.front = front};
    if ((status = gck_slack_grid_init(&pricer->grid, front->chain->options, buckets, range)) != GCK_OK
        || (status = gck_labels_reserve(&pricer->labels, most)) != GCK_OK
        || (status = gck_labels_reserve(&pricer->now, most)) != GCK_OK) {
        return status;
    }
    pricer->options = gck_planner_memory(front->chain->options, sizeof *pricer->options);
    pricer->times = gck_planner_memory(most, sizeof *pricer->times);
    pricer->now_times = gck_planner_memory(most, sizeof *pricer->now_times);
    pricer->origins = gck_planner_memory(most, sizeof *pricer->origins);
    return pricer->options == NULL || pricer->times == NULL || pricer->now_times == NULL || pricer->origins == NULL
               ? GCK_E_MEMORY : GCK_OK;
}

void gck_pricer_free(gck_pricer *pricer)
{
    gck_slack_grid_free(&pricer->grid);
    gck_labels_free(&pricer->labels);
    gck_labels_free(&pricer->now);
    free(pricer->options);
    free(pricer->times);
    free(pricer->now_times);
    free(pricer->origins);
}

/* Begin with the exact labels that are worth having at this price. */
static void begin(gck_pricer *pricer, gck_price price)
{
    const gck_labels *exact = &pricer->front->exact;
    gck_labels *labels = &pricer->labels;
    int64_t n = 0;

    for (int64_t i = 0; i < exact->n; i++) {
        gck_label label = exact->at[i];
        label.time = gck_priced_time(price, label.time, label.error);
        if (n == 0 || label.time < labels->at[n - 1].time) {
            n -= n > 0 && labels->at[n - 1].bytes == label.bytes;
            labels->at[n] = label;
            pricer->times[n] = exact->at[i].time;
            pricer->origins[n++] = (uint32_t)i;
        }
    }
    labels->n = n;
}

int gck_pricer_run(gck_pricer *pricer, gck_price before, gck_price after, int64_t change, int64_t most)
{
    gck_front *front = pricer->front;
    const gck_chain *chain = front->chain;
    const int64_t end = front->exact_from;
    int status = gck_front_add_pass(front, end);

    if (status != GCK_OK) {
        return status;
    }
    begin(pricer, after);
    for (int64_t l = end - 1; l >= 0; l--) {
        const int n = gck_priced_options(chain, l, l < change ? before : after, most, pricer->options);
        if ((status = gck_slack_grid_extend(&pricer->grid, &pricer->labels, pricer->options, n, &pricer->now))
            != GCK_OK) {
            return status;
        }
        for (int64_t i = 0; i < pricer->now.n; i++) {
            gck_label *label = &pricer->now.at[i];
            pricer->now_times[i] = pricer->times[label->from] + chain->time[l * chain->options + label->option];
            label->from = l == end - 1 ? pricer->origins[label->from] : label->from;
        }
        if ((status = gck_front_keep_steps(front, l, &pricer->now)) != GCK_OK) {
            return status;
        }
        const gck_labels labels = pricer->labels;
        int64_t *const times = pricer->times;
        pricer->labels = pricer->now;
        pricer->times = pricer->now_times;
        pricer->now = labels;
        pricer->now_times = times;
    }
    return GCK_OK;
}
