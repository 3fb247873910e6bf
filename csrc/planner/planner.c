/* planner.c: passes over the chain from the last region to the first, and plans from them.
 *
 * The first pass keeps all labels while no region has more than `buckets`.  The others begin with the last
 * of these exact labels, and thin labels to one for each bucket of slack (slack_grid.h).  Without errors
 * one is enough.  With errors a front has one for each of about 16 prices of error, with a quarter of the
 * buckets, and one for bytes and error alone, with all of them, so that it has the plan of fewest bytes
 * for each error.  A pass notes of each label its option and the label that it extends: every plan of the
 * front can be read off, and is true to its bytes, time and error, whatever was thinned.
 *
 * For two given budgets a price is looked for at which choices with more error than the budget cost as
 * much as choices with less.  The budget lies between two known points; a pass at the price at which both
 * cost the same finds a point below the line through them, or there is none.  Where regions are alike, all
 * of them would change their option at that price; so the first have a slightly higher one and the others
 * a slightly lower one, and how many is looked for.  Last, options of one region or of two are changed
 * until no change is better.  The best plan so far is within both budgets at all times, and at the price
 * that was found the lower bound is best. */
#include "planner/planner.h"

#include "planner/slack_grid.h"

#include <string.h>

enum { ROUNDS = 16, FINER = 2 };             /* passes at most for a price; times the buckets of a bound with errors */

/* ---- passes ---- */

static int begin_pass(gck_front *front)
{
    const int64_t n = front->chain->regions + 1;
    gck_step **steps = gck_planner_memory(n, sizeof *steps);

    if (steps == NULL) {
        return GCK_E_MEMORY;
    }
    memset(steps, 0, (size_t)n * sizeof *steps);
    front->passes[front->n_passes++] = steps;
    return GCK_OK;
}

static void drop_pass(gck_front *front)
{
    gck_step **steps = front->passes[--front->n_passes];

    for (int64_t l = 0; l <= front->chain->regions; l++) {
        free(steps[l]);
    }
    free(steps);
}

/* Note how the labels of a region were made, in the last pass. */
static int keep_steps(gck_front *front, int64_t region, const gck_labels *labels)
{
    gck_step *steps = gck_planner_memory(labels->n, sizeof *steps);

    if (steps == NULL) {
        return GCK_E_MEMORY;
    }
    for (int64_t i = 0; i < labels->n; i++) {
        steps[i] = (gck_step){labels->at[i].from, labels->at[i].choice.option};
    }
    front->passes[front->n_passes - 1][region] = steps;
    return GCK_OK;
}

/* The plan of a label of region 0. */
static void set_plan(const gck_front *front, const gck_label *label, gck_solution *plan)
{
    gck_step **steps = front->passes[label->choice.pass];
    gck_step step = {label->from, label->choice.option};

    plan->found = 1;
    plan->bytes = label->bytes;
    plan->error = label->error;
    plan->time = label->time;
    for (int64_t l = 0; l < front->chain->regions; l++) {
        plan->choices[l] = step.option;
        if (l + 1 < front->chain->regions) {
            steps = steps[l + 1] != NULL ? steps : front->passes[0];
            step = steps[l + 1][step.from];
        }
    }
}

/* The first pass: extend all labels as far as they are not too many. */
static int run_exact_pass(gck_front *front)
{
    const gck_chain *chain = front->chain;
    gck_labels labels = {.at = NULL}, spare = {.at = NULL};
    int status = begin_pass(front);

    if (status == GCK_OK && (status = gck_labels_reserve(&front->exact, 1)) == GCK_OK) {
        front->exact.at[front->exact.n++] = (gck_label){.bytes = chain->last_need};
        front->exact_from = chain->regions;
    }
    while (status == GCK_OK && front->exact_from > 0) {
        const int n = gck_chain_options(chain, front->exact_from - 1, NULL, 0, front->options);
        status = gck_labels_extend(&front->exact, front->options, n, chain->error != NULL, front->buckets, &labels,
                                   &spare);
        if (status != GCK_OK || labels.n > front->buckets) {
            break;
        }
        gck_labels_swap(&front->exact, &labels);
        status = keep_steps(front, --front->exact_from, &front->exact);
    }
    free(labels.at);
    free(spare.at);
    return status;
}

/* What passes need that thin labels. */
typedef struct {
    gck_front     *front;
    gck_slack_grid grid;
    gck_labels     labels, spare;            /* of region 0 after a pass */
    int64_t       *times, *spare_times;      /* with errors, of the labels, whose time is a cost; malloc */
} thinner;

static int thinner_init(thinner *t, gck_front *front, int64_t buckets)
{
    const int64_t most = gck_larger(buckets + 2, front->exact.n);

    *t = (thinner){.front = front, .times = gck_planner_memory(most, sizeof *t->times),
                   .spare_times = gck_planner_memory(most, sizeof *t->times)};
    return t->times != NULL && t->spare_times != NULL
               ? gck_slack_grid_init(&t->grid, front->chain->options, buckets, front->range) : GCK_E_MEMORY;
}

static void thinner_free(thinner *t)
{
    gck_slack_grid_free(&t->grid);
    free(t->labels.at);
    free(t->spare.at);
    free(t->times);
    free(t->spare_times);
}

/* Set t->labels to the exact ones that are worth having at this price. */
static int begin_labels(thinner *t, gck_price price)
{
    const gck_labels *exact = &t->front->exact;
    gck_labels *labels = &t->labels;
    const int status = gck_labels_reserve(labels, exact->n);
    int64_t n = 0;

    for (int64_t i = 0; i < exact->n && status == GCK_OK; i++) {
        gck_label label = exact->at[i];
        label.time = gck_cost(price, label.time, label.error);
        if (n == 0 || label.time < labels->at[n - 1].time) {
            n -= n > 0 && labels->at[n - 1].bytes == label.bytes;
            labels->at[n] = label;
            t->times[n++] = exact->at[i].time;
        }
    }
    labels->n = n;
    return status == GCK_OK ? keep_steps(t->front, t->front->exact_from, labels) : status;
}

/* Set t->labels to their extensions by the options of a region. */
static int thin_labels(thinner *t, int64_t region, const gck_price *price, int64_t most_error)
{
    const gck_chain *chain = t->front->chain;
    const int64_t *time = chain->time + region * chain->options;
    const int n = gck_chain_options(chain, region, price, most_error, t->front->options);
    const int status = gck_slack_grid_extend(&t->grid, &t->labels, t->front->options, n, &t->spare);
    int64_t *times = t->times;

    if (status != GCK_OK) {
        return status;
    }
    gck_labels_swap(&t->labels, &t->spare);
    t->times = t->spare_times;
    t->spare_times = times;
    for (int64_t i = 0; i < t->labels.n && chain->error != NULL; i++) {
        t->times[i] = times[t->labels.at[i].from] + time[t->labels.at[i].choice.option];
    }
    return keep_steps(t->front, region, &t->labels);
}

/* Extend the front's exact labels to region 0 in a pass of their own.  Regions before `change` have the
 * price `before`, the others `after`; most_error: as gck_chain_options() has it. */
static int run_pass(thinner *t, gck_price before, gck_price after, int64_t change, int64_t most_error)
{
    int status = begin_pass(t->front);

    status = status == GCK_OK ? begin_labels(t, after) : status;
    for (int64_t l = t->front->exact_from - 1; l >= 0 && status == GCK_OK; l--) {
        status = thin_labels(t, l, l < change ? &before : &after, most_error);
    }
    for (int64_t i = 0; i < t->labels.n && status == GCK_OK; i++) {
        gck_label *label = &t->labels.at[i];
        label->time = t->front->chain->error != NULL ? t->times[i] : label->time;
        label->choice.pass = (uint16_t)(t->front->n_passes - 1);
    }
    return status;
}

/* Append the labels of a pass to the front's plans. */
static int add_pass(thinner *t, gck_price price)
{
    gck_labels *plans = &t->front->plans;
    int status = run_pass(t, price, price, 0, INT64_MAX);

    if (status == GCK_OK && (status = gck_labels_reserve(plans, plans->n + t->labels.n)) == GCK_OK) {
        memcpy(plans->at + plans->n, t->labels.at, (size_t)t->labels.n * sizeof *plans->at);
        plans->n += t->labels.n;
    }
    return status;
}

/* Octaves of prices about the ratio of all times to all errors. */
static int add_prices(thinner *t)
{
    const gck_sums *sums = &t->front->sums;
    int status = add_pass(t, GCK_FREE);

    for (int octave = -GCK_OCTAVES; sums->error > 0 && octave <= GCK_OCTAVES && status == GCK_OK; octave++) {
        gck_price price = gck_price_of(sums->time + 1, sums->error, sums->error);
        price.exponent += octave;
        if (gck_priced(price, sums->error, 1) < GCK_NEVER / 4) {
            status = add_pass(t, price);
        }
    }
    return status;
}

/* Set the plans of a front that is not exact. */
static int find_plans(gck_front *front)
{
    thinner coarse = {.front = NULL}, fine;
    int status = thinner_init(&fine, front, front->buckets);

    if (status == GCK_OK && front->chain->error == NULL) {
        status = add_pass(&fine, GCK_FREE);
    } else if (status == GCK_OK && (status = thinner_init(&coarse, front, front->buckets / 4)) == GCK_OK
               && (status = add_prices(&coarse)) == GCK_OK && (status = add_pass(&fine, GCK_PRICELESS)) == GCK_OK) {
        status = gck_labels_sort_out(&front->plans, INT64_MAX - 1, &coarse.spare);
    }
    thinner_free(&coarse);
    thinner_free(&fine);
    return status;
}

int gck_front_new(const gck_chain *chain, int64_t buckets, gck_front **out)
{
    gck_sums sums;
    gck_front *front;
    int status;

    *out = NULL;
    if (gck_chain_check(chain, &sums) != GCK_OK || buckets < GCK_LEAST_BUCKETS || buckets > GCK_MOST_BUCKETS) {
        return GCK_E_RANGE;
    }
    if ((front = gck_planner_memory(1, sizeof *front)) == NULL) {
        return GCK_E_MEMORY;
    }
    *front = (gck_front){.chain = chain, .sums = sums, .buckets = buckets};
    front->options = gck_planner_memory(chain->options, sizeof *front->options);
    status = front->options != NULL ? GCK_OK : GCK_E_MEMORY;
    if (status == GCK_OK && gck_slack_range(chain, front->options, &front->range)) {
        status = run_exact_pass(front);
        if (status == GCK_OK && front->exact_from > 0) {
            status = find_plans(front);
        } else {
            gck_labels_swap(&front->plans, &front->exact);
        }
    }
    if (status != GCK_OK) {
        gck_front_free(front);
        return status;
    }
    *out = front;
    return GCK_OK;
}

void gck_front_free(gck_front *front)
{
    if (front == NULL) {
        return;
    }
    while (front->n_passes > 0) {
        drop_pass(front);
    }
    free(front->options);
    free(front->plans.at);
    free(front->exact.at);
    free(front);
}

int64_t gck_front_least(const gck_front *front, int64_t error_budget)
{
    for (int64_t i = 0; i < front->plans.n; i++) {
        if (front->plans.at[i].error <= error_budget) {
            return front->plans.at[i].bytes;
        }
    }
    return GCK_UNAVAILABLE;
}

/* ---- a plan for two budgets ---- */

/* The sums of a plan. */
typedef struct {
    int64_t time, error;
} point;

static point point_of(const gck_label *label) { return (point){label->time, label->error}; }

typedef struct {
    gck_front    *front;
    thinner       thinner;
    int64_t       budget, error_budget, most_error;
    gck_solution *best, tried;               /* malloc: the choices of `tried` */
    point         low, high;                 /* the best known plans with more error than the budget, and within */
    gck_price     price;                     /* the last one at which both cost the same */
} search;

static int64_t cost_of(gck_price price, point plan) { return gck_cost(price, plan.time, plan.error); }

static gck_price price_between(const search *s)
{
    return gck_price_of(s->high.time - s->low.time, s->low.error - s->high.error, s->front->sums.error);
}

/* Replace one of the two points by a plan, if it costs less than they do.  Returns whether it does. */
static int narrow(search *s, point plan, gck_price price)
{
    const int is_better = cost_of(price, plan) < gck_smaller(cost_of(price, s->low), cost_of(price, s->high));

    if (is_better) {
        *(plan.error > s->error_budget ? &s->low : &s->high) = plan;
    }
    return is_better;
}

/* Make a label's plan the best one, if exchanges make it faster. */
static int try_label(search *s, const gck_label *label)
{
    const gck_front *front = s->front;
    int status;

    set_plan(front, label, &s->tried);
    status = gck_exchange(front->chain, s->budget, s->error_budget, front->buckets, &s->tried);
    if (status == GCK_OK && s->tried.time < s->best->time) {
        uint32_t *choices = s->best->choices;
        memcpy(choices, s->tried.choices, (size_t)front->chain->regions * sizeof *choices);
        *s->best = s->tried;
        s->best->choices = choices;
    }
    return status;
}

/* Solve at these prices.  Sets `found` to the choices of least cost within the bytes, and tries the
 * fastest that are within both budgets. */
static int solve_at(search *s, gck_price before, gck_price after, int64_t change, point *found)
{
    const gck_labels *labels = &s->thinner.labels;
    const gck_label *fastest = NULL;
    const int passes = s->front->n_passes;
    int status = run_pass(&s->thinner, before, after, change, s->most_error);

    *found = (point){GCK_NEVER, GCK_NEVER};
    for (int64_t i = 0; status == GCK_OK && i < labels->n && labels->at[i].bytes <= s->budget; i++) {
        *found = point_of(&labels->at[i]);
        if (found->error <= s->error_budget && (fastest == NULL || found->time < fastest->time)) {
            fastest = &labels->at[i];
        }
    }
    status = fastest != NULL ? try_label(s, fastest) : status;
    while (s->front->n_passes > passes) {
        drop_pass(s->front);
    }
    return status;
}

/* Set the two points to plans of the front between which the price lies. */
static void begin_search(search *s)
{
    const gck_labels *plans = &s->front->plans;
    int is_better = 1;

    s->low = s->high = (point){s->best->time, s->best->error};
    for (int64_t i = 0; i < plans->n && plans->at[i].bytes <= s->budget; i++) {
        s->low = plans->at[i].time < s->low.time ? point_of(&plans->at[i]) : s->low;
    }
    while (is_better && s->low.time < s->high.time && s->low.error > s->error_budget) {
        const gck_price price = price_between(s);
        point least = s->high;
        for (int64_t i = 0; i < plans->n && plans->at[i].bytes <= s->budget; i++) {
            const point plan = point_of(&plans->at[i]);
            least = cost_of(price, plan) < cost_of(price, least) ? plan : least;
        }
        is_better = narrow(s, least, price);
    }
}

static int find_price(search *s)
{
    point found;
    int status = solve_at(s, GCK_FREE, GCK_FREE, 0, &found);

    if (found.error <= s->error_budget) {    /* bytes alone */
        return status;
    }
    s->low = found.time < s->low.time || s->low.error <= s->error_budget ? found : s->low;
    for (int i = 0; i < ROUNDS && status == GCK_OK && s->low.time < s->high.time; i++) {
        s->price = price_between(s);
        if ((status = solve_at(s, s->price, s->price, 0, &found)) == GCK_OK && !narrow(s, found, s->price)) {
            break;
        }
    }
    return status;
}

/* Find how many regions have the higher price, by a 64th. */
static int find_change(search *s)
{
    const gck_price price = s->price, before = {price.mantissa + price.mantissa / 64, price.exponent};
    const gck_price after = {price.mantissa - price.mantissa / 64, price.exponent};
    int64_t low = 0, high = s->front->exact_from;
    int status = GCK_OK;

    while (status == GCK_OK && low < high) {
        const int64_t middle = low + (high - low) / 2;
        point found;
        status = solve_at(s, before, after, middle, &found);
        if (found.error <= s->error_budget) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return status;
}

/* Improve the best plan, which is of a front with errors that is not exact. */
static int improve_plan(search *s)
{
    gck_front *front = s->front;
    int status = thinner_init(&s->thinner, front, front->buckets);

    s->tried.choices = gck_planner_memory(front->chain->regions, sizeof *s->tried.choices);
    status = s->tried.choices == NULL ? GCK_E_MEMORY : status;
    begin_search(s);
    if (status == GCK_OK && (status = find_price(s)) == GCK_OK
        && (s->price.mantissa == 0 || (status = find_change(s)) == GCK_OK)) {
        status = gck_exchange(front->chain, s->budget, s->error_budget, front->buckets, s->best);
    }
    thinner_free(&s->thinner);
    free(s->tried.choices);
    return status;
}

/* A bound of the time of all plans within both budgets: errors cost their price, and the error budget is
 * worth its price. */
static int find_bound(const search *s, int64_t *bound)
{
    const gck_front *front = s->front;
    const gck_labels end = {&(gck_label){.bytes = front->chain->last_need}, 1, 1};
    gck_bound of = {front->chain, &front->exact, front->exact_from, front->buckets + front->buckets / 2, s->budget,
                    s->most_error, s->price};

    if (front->chain->error != NULL) {
        of.labels = &end;
        of.from = front->chain->regions;
        of.buckets *= FINER;
    }
    const int status = gck_lower_bound(&of, s->best->choices, bound);
    *bound = gck_smaller(s->best->time, *bound - gck_priced(s->price, s->error_budget, 1));
    return status;
}

int gck_front_plan(gck_front *front, int64_t budget, int64_t error_budget, gck_solution *plan, int64_t *bound)
{
    /* All sums are below GCK_LIMIT: more changes nothing, and nothing overflows. */
    search s = {.front = front, .budget = gck_smaller(budget, GCK_LIMIT), .best = plan, .price = GCK_FREE,
                .error_budget = gck_smaller(error_budget, GCK_LIMIT)};
    const gck_labels *plans = &front->plans;
    const gck_label *found = NULL;
    int status = GCK_OK;

    for (int64_t i = 0; i < plans->n && plans->at[i].bytes <= budget; i++) {
        if (plans->at[i].error <= error_budget && (found == NULL || plans->at[i].time < found->time)) {
            found = &plans->at[i];
        }
    }
    if (found == NULL) {
        plan->found = 0;
        return GCK_OK;
    }
    set_plan(front, found, plan);
    *bound = plan->time;
    if (front->exact_from == 0) {
        return GCK_OK;
    }
    s.most_error = s.error_budget - front->sums.least_error;
    if (front->chain->error != NULL) {
        status = improve_plan(&s);
    }
    return status == GCK_OK ? find_bound(&s, bound) : status;
}
