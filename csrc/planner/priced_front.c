/* priced_front.c: passes over the chain, one for each price of error and some between. */
#include "planner/priced_front.h"

#include "planner/prices.h"
#include "planner/slack_grid.h"

#include <stdlib.h>
#include <string.h>

enum {
    OCTAVES = 7,                             /* of prices below and above the typical one */
    STAGES = 32,                             /* regions of a price's pass where others may go on */
    LEAST = 4, MORE = 60,                    /* passes between two prices: where plans are alike, and beyond that */
    MAX_PRICES = 2 * OCTAVES + 3,
};

/* Labels of one region whose `time` includes the price of their error; `times` does not. */
typedef struct {
    gck_labels labels;
    int64_t   *times;                        /* malloc */
    int64_t    region;
    uint32_t   pass;                         /* to which they belong */
} stage;

typedef struct {
    gck_front     *front;
    gck_slack_grid grid;
    gck_option    *options;
    stage          start, next, now;
    uint32_t      *origins;                  /* of next's labels at the pass's end; malloc */
    stage          left[2][STAGES];          /* of the passes of the last two prices, where others go on */
    gck_labels     plans;                    /* of all passes, with true times; `from` is a place in `ends` */
    gck_end       *ends;                     /* plans.capacity; malloc */
} solver;

static void stage_free(stage *s)
{
    gck_labels_free(&s->labels);
    free(s->times);
    s->times = NULL;
}

/* GCK_OK or GCK_E_MEMORY. */
static int stage_init(stage *s, int64_t capacity)
{
    *s = (stage){.times = gck_planner_memory(capacity, sizeof *s->times)};
    return s->times == NULL ? GCK_E_MEMORY : gck_labels_reserve(&s->labels, capacity);
}

static void stage_copy(stage *to, const stage *from)
{
    const size_t n = (size_t)from->labels.n;

    memcpy(to->labels.at, from->labels.at, n * sizeof *to->labels.at);
    memcpy(to->times, from->times, n * sizeof *to->times);
    to->labels.n = from->labels.n;
    to->region = from->region;
    to->pass = from->pass;
}

/* Set s->next to the labels of `start` that are worth having at this price. */
static void begin(solver *s, const stage *start, gck_price price)
{
    const int free_of_charge = price.mantissa < 0;
    gck_labels *next = &s->next.labels;
    int64_t least = INT64_MAX;

    for (int64_t i = 0; i < start->labels.n; i++) {
        least = gck_smaller(least, start->labels.at[i].error);
    }
    next->n = 0;
    for (int64_t i = 0; i < start->labels.n; i++) {
        gck_label label = start->labels.at[i];
        label.time = start->times[i] + (free_of_charge ? 0 : gck_priced(price, label.error, 0));
        if ((!free_of_charge || label.error == least) && (next->n == 0 || label.time < next->at[next->n - 1].time)) {
            /* Exact labels with errors may have equal bytes. */
            next->n -= next->n > 0 && next->at[next->n - 1].bytes == label.bytes;
            next->at[next->n] = label;
            s->next.times[next->n] = start->times[i];
            s->origins[next->n++] = (uint32_t)i;
        }
    }
}

/* Add the labels of region 0 to the plans; GCK_OK or GCK_E_MEMORY. */
static int add_plans(solver *s)
{
    const gck_labels *labels = &s->next.labels;
    int64_t at = s->plans.n;

    if (at + labels->n > s->plans.capacity) {
        const int64_t capacity = 2 * s->plans.capacity + labels->n;
        gck_end *ends = gck_planner_memory(capacity, sizeof *ends);
        if (ends == NULL) {
            return GCK_E_MEMORY;
        }
        if (at > 0) {
            memcpy(ends, s->ends, (size_t)at * sizeof *ends);
        }
        free(s->ends);
        s->ends = ends;
        if (gck_labels_reserve(&s->plans, capacity) != GCK_OK) {
            return GCK_E_MEMORY;
        }
    }
    for (int64_t i = 0; i < labels->n; i++, at++) {
        s->ends[at] = (gck_end){labels->at[i].from, s->next.pass};
        s->plans.at[at] = labels->at[i];
        s->plans.at[at].time = s->next.times[i];
        s->plans.at[at].from = (uint32_t)at;
    }
    s->plans.n = at;
    return GCK_OK;
}

/* Solve regions before start->region at a price.  `left`: STAGES, to which labels are copied; or
 * NULL. */
static int run(solver *s, const stage *start, gck_price price, stage *left)
{
    gck_front *front = s->front;
    const gck_chain *chain = front->chain;
    const int64_t end = start->region;
    int status = gck_front_add_pass(front, end, start->pass);

    if (status != GCK_OK) {
        return status;
    }
    begin(s, start, price);
    for (int64_t l = end - 1; l >= 0; l--) {
        const int n = gck_priced_options(chain, l, price, INT64_MAX, s->options);
        if ((status = gck_slack_grid_extend(&s->grid, &s->next.labels, s->options, n, &s->now.labels)) != GCK_OK) {
            return status;
        }
        for (int64_t i = 0; i < s->now.labels.n; i++) {
            gck_label *label = &s->now.labels.at[i];
            s->now.times[i] = s->next.times[label->from] + chain->time[l * chain->options + label->option];
            label->from = l == end - 1 ? s->origins[label->from] : label->from;
        }
        if ((status = gck_front_keep_steps(front, l, &s->now.labels)) != GCK_OK) {
            return status;
        }
        const stage used = s->next;
        s->next = s->now;
        s->now = used;
        s->next.region = l;
        s->next.pass = (uint32_t)front->n_passes - 1;
        for (int i = 0; left != NULL && i < STAGES && l > 0; i++) {
            if (l == end * (i + 1) / (STAGES + 1)) {
                stage_copy(&left[i], &s->next);
            }
        }
    }
    return add_plans(s);
}

/* Choose prices by octaves about the ratio of all times to all errors; return how many.  The first
 * is 0, the last leaves out all avoidable errors.  Also set the sum of the largest errors. */
static int choose_prices(const gck_chain *chain, gck_price *prices, int64_t *most_error)
{
    int64_t times = 0, errors = 0, k = 0;
    int n = 0;

    for (int64_t l = 0; l < chain->regions; l++) {
        int64_t time = 0, error = 0;
        for (int64_t at = l * chain->options; at < (l + 1) * chain->options; at++) {
            if (chain->need[at] != GCK_UNAVAILABLE) {
                time = gck_larger(time, chain->time[at]);
                error = gck_larger(error, chain->error[at]);
            }
        }
        times += time;
        errors += error;
    }
    *most_error = errors;
    prices[n++] = (gck_price){0, 0};
    if (errors == 0) {
        return n;
    }
    while (gck_priced(gck_price_of(k), errors, 0) < times) {
        k += GCK_PRICES_IN_OCTAVE;
    }
    while (gck_priced(gck_price_of(k), errors, 0) > times) {
        k -= GCK_PRICES_IN_OCTAVE;
    }
    for (int64_t octave = -OCTAVES; octave <= OCTAVES; octave++) {
        const gck_price price = gck_price_of(k + octave * GCK_PRICES_IN_OCTAVE);
        if (gck_priced(price, errors, 0) < GCK_NEVER / 4) {
            prices[n++] = price;
        }
    }
    prices[n++] = (gck_price){-1, 0};
    return n;
}

/* How many passes there should be between two prices, whose passes found n_low and n_high plans:
 * the more, the larger the share of error is that the higher price takes from plans of as many bytes. */
static int64_t count_between(const gck_label *low, int64_t n_low, const gck_label *high, int64_t n_high,
                             int64_t most_error)
{
    int64_t taken = 0;                       /* in 256ths */

    for (int64_t i = 0, at = 0; i < n_high; i++) {
        while (at + 1 < n_low && low[at + 1].bytes <= high[i].bytes) {
            at++;
        }
        /* Errors far below the largest hardly count. */
        taken += gck_larger(low[at].error - high[i].error, 0) / ((low[at].error + most_error / 64) / 256 + 1);
    }
    return gck_smaller(LEAST + MORE * (taken / n_high) / 256, STAGES);
}

/* All passes. */
static int run_all(solver *s)
{
    gck_price prices[MAX_PRICES];
    int64_t most_error, low = 0, n_low = 0;
    const int n = choose_prices(s->front->chain, prices, &most_error);
    int status = GCK_OK;

    for (int k = 0; k < n && status == GCK_OK; k++) {
        const int64_t high = s->plans.n;
        if ((status = run(s, &s->start, prices[k], s->left[k % 2])) != GCK_OK) {
            return status;
        }
        const gck_label *plans = s->plans.at;
        const int64_t n_high = s->plans.n - high;
        const int64_t between = k > 0 ? count_between(plans + low, n_low, plans + high, n_high, most_error) : 0;
        for (int64_t i = 1; i <= between && status == GCK_OK; i++) {
            const stage *left = &s->left[1 - k % 2][i * (STAGES + 1) / (between + 1) - 1];
            status = left->region > 0 ? run(s, left, prices[k], NULL) : GCK_OK;
        }
        low = high;
        n_low = n_high;
    }
    return status;
}

int gck_priced_front_solve(gck_front *front, int64_t range)
{
    const int64_t buckets = front->buckets / 4, most = gck_larger(buckets + 2, front->exact.n);
    solver s = {.front = front};
    int status = gck_slack_grid_init(&s.grid, front->chain->options, buckets, range);

    if (status != GCK_OK || (status = stage_init(&s.start, most)) != GCK_OK
        || (status = stage_init(&s.next, most)) != GCK_OK || (status = stage_init(&s.now, most)) != GCK_OK) {
        goto exit;
    }
    for (int i = 0; i < 2 * STAGES; i++) {
        if ((status = stage_init(&s.left[i / STAGES][i % STAGES], most)) != GCK_OK) {
            goto exit;
        }
    }
    s.options = gck_planner_memory(front->chain->options, sizeof *s.options);
    s.origins = gck_planner_memory(most, sizeof *s.origins);
    if (s.options == NULL || s.origins == NULL) {
        status = GCK_E_MEMORY;
        goto exit;
    }
    memcpy(s.start.labels.at, front->exact.at, (size_t)front->exact.n * sizeof *front->exact.at);
    s.start.labels.n = front->exact.n;
    for (int64_t i = 0; i < front->exact.n; i++) {
        s.start.times[i] = front->exact.at[i].time;
    }
    s.start.region = front->exact_from;
    if ((status = run_all(&s)) == GCK_OK
        && (status = gck_labels_sort_out(&s.plans, INT64_MAX - 1, &s.start.labels)) == GCK_OK) {
        front->plans = s.plans;
        front->ends = s.ends;
        s.plans = (gck_labels){.at = NULL};
        s.ends = NULL;
    }
exit:
    gck_slack_grid_free(&s.grid);
    stage_free(&s.start);
    stage_free(&s.next);
    stage_free(&s.now);
    for (int i = 0; i < 2 * STAGES; i++) {
        stage_free(&s.left[i / STAGES][i % STAGES]);
    }
    free(s.options);
    free(s.origins);
    gck_labels_free(&s.plans);
    free(s.ends);
    return status;
}
