/* priced_plan.c: the price for two budgets, and plans about it. */
#include "planner/priced_plan.h"

#include "planner/exchange.h"
#include "planner/priced_pass.h"

#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 16 };                        /* passes at most that look for the price */

/* The sums of a plan. */
typedef struct {
    int64_t time, error;
} point;

typedef struct {
    gck_front *front;
    gck_pricer pricer;
    int64_t    budget, error_budget;
    int64_t    most, errors;                 /* as gck_pricer_run() has it; the sum of the largest errors */
    gck_solution *best, tried;               /* malloc: the choices of `tried` */
    point      low, high;                    /* the best known plans with more error than the budget, and within */
} search;

static int64_t cost(gck_price price, point plan)
{
    return gck_priced_time(price, plan.time, plan.error);
}

/* The price at which both plans cost the same. */
static gck_price price_between(const search *s)
{
    return gck_price_of(s->high.time - s->low.time, s->low.error - s->high.error, s->errors);
}

/* Take a plan as one of the two, if it costs less than they do at their price.  Returns whether it
 * does. */
static int take(search *s, point plan, gck_price price)
{
    const int is_better = cost(price, plan) < gck_smaller(cost(price, s->low), cost(price, s->high));

    if (is_better && plan.error > s->error_budget) {
        s->low = plan;
    } else if (is_better) {
        s->high = plan;
    }
    return is_better;
}

/* Keep a label of the last pass, as far as exchanges make it faster than the best plan. */
static int improve(search *s, int64_t label)
{
    const gck_label *plan = &s->pricer.labels.at[label];
    gck_solution *tried = &s->tried;
    int status;

    tried->bytes = plan->bytes;
    tried->error = plan->error;
    tried->time = s->pricer.times[label];
    gck_front_choices_from(s->front, plan, (uint32_t)s->front->n_passes - 1, tried->choices);
    status = gck_exchange(s->front->chain, s->budget, s->error_budget, s->front->buckets, tried);
    if (status == GCK_OK && tried->time < s->best->time) {
        s->best->bytes = tried->bytes;
        s->best->error = tried->error;
        s->best->time = tried->time;
        memcpy(s->best->choices, tried->choices, (size_t)s->front->chain->regions * sizeof *tried->choices);
    }
    return status;
}

/* Solve at these prices.  Sets `found` to the plan of least cost within the bytes, and improves the
 * fastest that is within both budgets. */
static int run(search *s, gck_price before, gck_price after, int64_t change, point *found)
{
    const gck_labels *labels = &s->pricer.labels;
    int status = gck_pricer_run(&s->pricer, before, after, change, s->most);
    int64_t fastest = -1;

    *found = (point){GCK_NEVER, GCK_NEVER};
    for (int64_t i = 0; status == GCK_OK && i < labels->n && labels->at[i].bytes <= s->budget; i++) {
        *found = (point){s->pricer.times[i], labels->at[i].error};
        if (found->error <= s->error_budget && (fastest < 0 || found->time < s->pricer.times[fastest])) {
            fastest = i;
        }
    }
    status = fastest >= 0 ? improve(s, fastest) : status;
    gck_front_drop_pass(s->front);
    return status;
}

/* Set the two plans to those of the front between which the price lies. */
static void begin(search *s)
{
    const gck_labels *plans = &s->front->plans;
    int is_better = 1;

    s->high = (point){s->best->time, s->best->error};
    s->low = s->high;
    for (int64_t i = 0; i < plans->n && plans->at[i].bytes <= s->budget; i++) {
        if (plans->at[i].time < s->low.time) {
            s->low = (point){plans->at[i].time, plans->at[i].error};
        }
    }
    while (is_better && s->low.time < s->high.time && s->low.error > s->error_budget) {
        const gck_price price = price_between(s);
        point least = s->high;
        for (int64_t i = 0; i < plans->n && plans->at[i].bytes <= s->budget; i++) {
            const point plan = {plans->at[i].time, plans->at[i].error};
            least = cost(price, plan) < cost(price, least) ? plan : least;
        }
        is_better = take(s, least, price);
    }
}

/* Find the price. */
static int find_price(search *s, gck_price *price)
{
    point found;
    int status = run(s, GCK_FREE, GCK_FREE, 0, &found);

    *price = GCK_FREE;
    if (found.error <= s->error_budget) {    /* bytes alone */
        return status;
    }
    if (found.time < s->low.time || s->low.error <= s->error_budget) {
        s->low = found;
    }
    for (int i = 0; i < ROUNDS && status == GCK_OK && s->low.time < s->high.time; i++) {
        *price = price_between(s);
        if ((status = run(s, *price, *price, 0, &found)) == GCK_OK && !take(s, found, *price)) {
            break;
        }
    }
    return status;
}

/* Find how many regions have the higher price. */
static int find_change(search *s, gck_price price)
{
    const gck_price before = gck_price_beside(price, 1), after = gck_price_beside(price, -1);
    int64_t low = 0, high = s->front->exact_from;
    int status = GCK_OK;

    while (status == GCK_OK && low < high) {
        const int64_t middle = low + (high - low) / 2;
        point found;
        status = run(s, before, after, middle, &found);
        if (found.error <= s->error_budget) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return status;
}

int gck_priced_plan_improve(gck_front *front, int64_t budget, int64_t error_budget, gck_solution *plan,
                            gck_price *price)
{
    search s = {.front = front, .budget = budget, .error_budget = error_budget, .best = plan};
    int64_t least;
    int status = gck_pricer_init(&s.pricer, front, front->buckets, front->range);

    s.tried.choices = gck_planner_memory(front->chain->regions, sizeof *s.tried.choices);
    status = s.tried.choices == NULL ? GCK_E_MEMORY : status;
    gck_error_sums(front->chain, &least, &s.errors);
    s.most = error_budget - least;
    begin(&s);
    if (status == GCK_OK && (status = find_price(&s, price)) == GCK_OK
        && (price->mantissa == 0 || (status = find_change(&s, *price)) == GCK_OK)) {
        status = gck_exchange(front->chain, budget, error_budget, front->buckets, plan);
    }
    gck_pricer_free(&s.pricer);
    free(s.tried.choices);
    return status;
}
