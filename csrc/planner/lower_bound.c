/* lower_bound.c: the best time if bytes are rounded in favour of it.
 *
 * A grid of slack holds for each bucket a time that no plan with a slack in that bucket goes below.
 * A step to the next region's grid rounds the slack up to the end of its bucket.  The grids are laid
 * so that the plan in question is always at such an end: it gains nothing, and others only where
 * they differ from it.
 *
 * Errors are priced: for any price p >= 0 of an error, the least sum of time + p * error, less p *
 * error budget, is a bound.  The best of some prices is taken. */
#include "planner/lower_bound.h"

#include <stdlib.h>

#define NEVER (INT64_C(1) << 61)             /* a time beyond all sums, which may be added to */
#define ENOUGH (INT64_C(1) << 60)            /* a budget beyond all sums */

/* A price of error in ns: mantissa * 2**exponent. */
typedef struct {
    int64_t mantissa;
    int     exponent;
} price;

/* The grid of one region: bucket b ends at first + b * width, and there are n of them. */
typedef struct {
    int64_t first, n;
} grid;

typedef struct {
    const gck_front *front;
    int64_t          budget, error_budget;
    int64_t          width, most;            /* of a bucket, in bytes; buckets */
    uint32_t        *choices;                /* of the plan */
    int64_t         *slack;                  /* of the plan at each region */
    int64_t         *least, *greatest;       /* slack of any plan at each region */
    int64_t         *low, *high;             /* the first and the last slack that is looked at */
    gck_option      *options;
    int64_t         *time, *next;            /* most + 1: the bounds of this region and of the next */
} bounds;

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
static int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The price of so much error, rounded down or up; at most NEVER. */
static int64_t priced(price p, int64_t error, int up)
{
    const __int128 product = (__int128)error * p.mantissa;
    const int down = p.exponent < 0 ? -p.exponent : 0;
    const __int128 rest = up ? ((__int128)1 << down) - 1 : 0;
    const __int128 value = p.exponent > 0 ? product << p.exponent : (product + rest) >> down;

    return value > NEVER ? NEVER : (int64_t)value;
}

/* The region's options at this price, without errors. */
static int options_of(const bounds *b, int64_t region, price p)
{
    const gck_chain *chain = b->front->chain;
    int n = 0;

    for (int64_t o = 0; o < chain->options; o++) {
        const int64_t at = region * chain->options + o;
        const int64_t error = chain->error != NULL ? chain->error[at] : 0;
        const gck_option option = {chain->kept[at], chain->need[at], chain->time[at] + priced(p, error, 0), 0, 0};
        if (option.need != GCK_UNAVAILABLE && error <= b->error_budget) {
            n = gck_options_add(b->options, n, &option);
        }
    }
    return n;
}

/* Set the slack that plans may have within the budget, before each region and after the last. */
static void find_slack(bounds *b)
{
    const gck_chain *chain = b->front->chain;

    b->slack[0] = b->least[0] = b->greatest[0] = b->budget;
    for (int64_t l = 0; l < chain->regions; l++) {
        int64_t least = INT64_MAX, most = INT64_MIN;
        for (int64_t at = l * chain->options; at < (l + 1) * chain->options; at++) {
            if (chain->need[at] != GCK_UNAVAILABLE) {
                least = smaller(chain->kept[at], least);
                most = larger(chain->kept[at], most);
            }
        }
        b->slack[l + 1] = b->slack[l] - chain->kept[l * chain->options + b->choices[l]];
        b->least[l + 1] = b->least[l] - most;
        b->greatest[l + 1] = b->greatest[l] - least;
    }
}

/* Set the slack between which the grid of each region up to `from` lies, and the width of a
 * bucket. */
static void find_grids(bounds *b, const gck_labels *labels, int64_t from, price p)
{
    int64_t first = labels->at[0].bytes, last = labels->at[labels->n - 1].bytes, range = 0;

    for (int64_t l = from;; l--) {
        b->low[l] = larger(first, b->least[l]);
        b->high[l] = larger(b->low[l], smaller(last, b->greatest[l]));
        range = larger(range, b->high[l] - b->low[l]);
        if (l == 0) {
            break;
        }
        const int n = options_of(b, l - 1, p);
        int64_t new_first = INT64_MAX, new_last = INT64_MAX, time = INT64_MAX;
        for (int o = 0; o < n; o++) {
            const gck_option *option = &b->options[o];
            const int64_t bytes = larger(last + option->kept, option->need);
            new_first = smaller(new_first, larger(first + option->kept, option->need));
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

/* The grid whose bucket 0 is the first to hold `low`, and which has the plan's slack at an end. */
static grid grid_of(const bounds *b, int64_t region)
{
    const int64_t first = b->slack[region] - floor_div(b->slack[region] - b->low[region], b->width) * b->width;

    return (grid){first, larger(ceil_div(b->high[region] - first, b->width), 0) + 1};
}

/* b->time of a region, from b->next of the one after it. */
static void extend(bounds *b, int n, grid now, grid next)
{
    for (int64_t i = 0; i < now.n; i++) {
        b->time[i] = NEVER;
    }
    for (int o = 0; o < n; o++) {
        const gck_option *option = &b->options[o];
        const int64_t shift = ceil_div(now.first - option->kept - next.first, b->width);
        const int64_t begin = larger(larger(-shift, 0), ceil_div(option->need - now.first, b->width));
        const int64_t end = smaller(next.n - shift, now.n), beyond = larger(end, begin), time = option->time;
        for (int64_t i = begin; i < end; i++) {
            const int64_t new = b->next[i + shift] + time;
            b->time[i] = new < b->time[i] ? new : b->time[i];
        }
        if (beyond < now.n) {                /* beyond the next grid, its last bucket holds */
            b->time[beyond] = smaller(b->time[beyond], b->next[next.n - 1] + time);
        }
    }
    for (int64_t i = 0; i < now.n; i++) {
        b->time[i] = smaller(b->time[i], i > 0 ? b->time[i - 1] : NEVER);
    }
}

/* The bound at a price, from the labels of region `from` on; NEVER: no plan. */
static int64_t bound_at(bounds *b, const gck_labels *labels, int64_t from, price p)
{
    find_grids(b, labels, from, p);
    grid next = grid_of(b, from);
    for (int64_t i = 0, at = 0; i < next.n; i++) {
        while (at < labels->n && labels->at[at].bytes <= next.first + i * b->width) {
            at++;
        }
        b->next[i] = at > 0 ? labels->at[at - 1].time : NEVER;
    }
    for (int64_t l = from - 1; l >= 0; l--) {
        const grid now = grid_of(b, l);
        int64_t *const done = b->next;
        extend(b, options_of(b, l, p), now, next);
        b->next = b->time;
        b->time = done;
        next = now;
    }
    return b->next[smaller((b->budget - next.first) / b->width, next.n - 1)];
}

/* The bound of a price, when the price of the error budget is taken off. */
static int64_t bound_with_errors(bounds *b, price p)
{
    const gck_label end = {.bytes = b->front->chain->last_need};
    const gck_labels labels = {(gck_label *)&end, 1, 1};
    const int64_t time = bound_at(b, &labels, b->front->chain->regions, p);

    return time - priced(p, b->error_budget, 1);
}

/* The price number k: eight in each octave. */
static price price_of(int64_t k)
{
    return (price){8 + (k & 7), (int)floor_div(k, 8) - 3};
}

/* The best bound over prices, by golden section: it rises and then falls with the price. */
static int64_t best_bound(bounds *b, int64_t time)
{
    int64_t best = bound_with_errors(b, (price){0, 0}), steps = 0;
    int64_t last = 0, first, sizes[2] = {1, 2};

    if (b->error_budget <= 0) {              /* options with an error are left out */
        return best;
    }
    /* A price at which the error budget is worth more than the plan bounds nothing. */
    while (priced(price_of(last), b->error_budget, 0) > time) {
        last -= 8;
    }
    while (priced(price_of(last), b->error_budget, 0) <= time) {
        last += 8;
    }
    first = last - 8 * 21;
    while (sizes[1] < last - first) {        /* Fibonacci numbers, so that a step needs one new bound */
        const int64_t sum = sizes[0] + sizes[1];
        sizes[0] = sizes[1];
        sizes[1] = sum;
        steps++;
    }
    int64_t at[2] = {first + sizes[1] - sizes[0], first + sizes[0]};
    int64_t found[2] = {bound_with_errors(b, price_of(at[0])), bound_with_errors(b, price_of(at[1]))};
    for (;;) {
        best = larger(best, larger(found[0], found[1]));
        if (steps-- <= 0) {
            return best;
        }
        const int64_t size = sizes[1] - sizes[0];
        sizes[1] = sizes[0];
        sizes[0] = size;
        if (found[0] >= found[1]) {
            at[1] = at[0];
            found[1] = found[0];
            at[0] = first + sizes[1] - sizes[0];
            found[0] = bound_with_errors(b, price_of(at[0]));
        } else {
            first = at[0];
            at[0] = at[1];
            found[0] = found[1];
            at[1] = first + sizes[0];
            found[1] = bound_with_errors(b, price_of(at[1]));
        }
    }
}

int gck_lower_bound(const gck_front *front, int64_t plan, int64_t budget, int64_t error_budget, int64_t *bound)
{
    const int64_t regions = front->chain->regions, time = front->plans.at[plan].time;
    bounds b = {front, smaller(budget, ENOUGH), error_budget, 0, 2 * front->buckets};
    int64_t *memory = NULL;
    int status = GCK_OK;

    if (front->exact_from == 0) {
        *bound = time;
        return GCK_OK;
    }
    memory = gck_planner_memory(5 * (regions + 1), sizeof *memory);
    b.choices = gck_planner_memory(regions, sizeof *b.choices);
    b.options = gck_planner_memory(front->chain->options, sizeof *b.options);
    b.time = gck_planner_memory(b.most + 2, sizeof *b.time);
    b.next = gck_planner_memory(b.most + 2, sizeof *b.next);
    if (memory == NULL || b.choices == NULL || b.options == NULL || b.time == NULL || b.next == NULL) {
        status = GCK_E_MEMORY;
        goto exit;
    }
    b.slack = memory;
    b.least = b.slack + regions + 1;
    b.greatest = b.least + regions + 1;
    b.low = b.greatest + regions + 1;
    b.high = b.low + regions + 1;
    gck_front_choices(front, plan, b.choices);
    find_slack(&b);
    *bound = smaller(time, front->chain->error != NULL ? best_bound(&b, time)
                                                       : bound_at(&b, &front->exact, front->exact_from,
                                                                  (price){0, 0}));
exit:
    free(memory);
    free(b.choices);
    free(b.options);
    free(b.time);
    free(b.next);
    return status;
}
