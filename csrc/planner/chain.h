/* chain.h: regions, their options and what these cost; labels of what was chosen; plans. */
#ifndef GRADCKPT_CHAIN_H
#define GRADCKPT_CHAIN_H

#include "gradckpt.h"

#include <stdlib.h>

#define GCK_LIMIT (INT64_C(1) << 60)         /* sums of bytes, times and errors are below it     */
#define GCK_NEVER (INT64_C(1) << 61)         /* a time beyond all sums, which may be added to    */
#define GCK_UNAVAILABLE INT64_MAX            /* need of an option that the region does not have  */
enum { GCK_MAX_REGIONS = 1 << 20, GCK_MAX_OPTIONS = 1024 };

static inline int64_t gck_larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t gck_smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Memory of the planner; NULL when there is none.  free() gives it back. */
static inline void *gck_planner_memory(int64_t count, size_t size)
{
    return malloc((size_t)(count > 0 ? count : 1) * size);
}

/* Tables are row-major: option o of region l is at l * options + o. */
typedef struct {
    int64_t        regions, options;
    const int64_t *kept, *need, *time;       /* bytes, which may be negative; bytes; ns >= 0 */
    const int64_t *error;                    /* >= 0; NULL: no option has one               */
    int64_t        last_need;                /* GCK_UNAVAILABLE: no budget is enough        */
} gck_chain;

/* Sums over regions, of the options that they have: the largest times, the smallest and the largest
 * errors. */
typedef struct {
    int64_t time, least_error, error;
} gck_sums;

/* Set *sums.  GCK_OK, or GCK_E_RANGE when a time or an error is negative, or when the sum over regions
 * of the largest number of bytes, time or error reaches GCK_LIMIT. */
int gck_chain_check(const gck_chain *chain, gck_sums *sums);

/* ---- options ---- */

/* What an error costs in time: ns for each unit, mantissa * 2**exponent.  A mantissa < 0: errors count,
 * times do not. */
typedef struct {
    int64_t mantissa;
    int     exponent;
} gck_price;

#define GCK_FREE ((gck_price){0, 0})
#define GCK_PRICELESS ((gck_price){-1, 0})

/* The price at which `error` is worth `time`, both > 0, or less: so much that `errors` are worth
 * no more than 2**59. */
gck_price gck_price_of(int64_t time, int64_t error, int64_t errors);

/* The price of so much error, rounded down or up. */
int64_t gck_priced(gck_price price, int64_t error, int up);

/* The cost of so much time and error. */
int64_t gck_cost(gck_price price, int64_t time, int64_t error);

/* Which option of a region; in a label, too, the pass of the next region's label (planner.c).  One
 * word, so that a label takes it from its option at once. */
typedef struct {
    uint16_t option, pass;
} gck_choice;

/* One option of one region.  Where errors are priced, `time` is its cost.  The pass is 0. */
typedef struct {
    int64_t    kept, need, time, error;
    gck_choice choice;
} gck_option;

/* Write the available options of a region to `options`, in their order; return how many.  Of options
 * that are as good in everything the first stays, and none that is worse than another: in bytes, time
 * and error when `price` is NULL, else in bytes and cost.  With a price, options whose error is larger
 * than the region's smallest by more than `most_error` are left out. */
int gck_chain_options(const gck_chain *chain, int64_t region, const gck_price *price, int64_t most_error,
                      gck_option *options);

/* ---- labels ---- */

/* Options chosen for this region and those after it: the slack that they need, and the sums of their
 * errors and times (or costs). */
typedef struct {
    int64_t    bytes, error, time;
    uint32_t   from;                         /* the label of the next region that it extends */
    gck_choice choice;
} gck_label;

/* By ascending bytes. */
typedef struct {
    gck_label *at;                           /* malloc */
    int64_t    n, capacity;
} gck_labels;

static inline void gck_labels_swap(gck_labels *a, gck_labels *b)
{
    const gck_labels labels = *a;

    *a = *b;
    *b = labels;
}

/* Make room for `capacity` labels; GCK_OK or GCK_E_MEMORY.  The labels are kept. */
int gck_labels_reserve(gck_labels *labels, int64_t capacity);

/* The label that takes `option` and goes on with label number `from`, which is `next`. */
static inline gck_label gck_label_extend(const gck_label *next, int64_t from, const gck_option *option)
{
    return (gck_label){gck_larger(next->bytes + option->kept, option->need), next->error + option->error,
                       next->time + option->time, (uint32_t)from, option->choice};
}

/* The best extension of a label by one of n options: of fewest bytes, of these the fastest; or
 * (`by_time`) the fastest, of these the one of fewest bytes. */
gck_label gck_label_best(const gck_label *next, int64_t from, const gck_option *options, int n, int by_time);

/* Set `out` to all labels that extend one of `next` by one of n options, without those that are in
 * no way better than another; without errors none is looked at.  `spare` is memory to work in.  `out`
 * then has more than `most` labels if there are more; which ones is undefined.  GCK_OK or GCK_E_MEMORY. */
int gck_labels_extend(const gck_labels *next, const gck_option *options, int n, int has_errors, int64_t most,
                      gck_labels *out, gck_labels *spare);

/* Sort labels by bytes, error, time, and remove those that are in no way better than another.  It
 * stops when more than `most` are left.  GCK_OK or GCK_E_MEMORY. */
int gck_labels_sort_out(gck_labels *labels, int64_t most, gck_labels *spare);

/* ---- plans ---- */

/* A plan: the budget that it needs, the sums of its errors and times, the option of each region. */
typedef struct {
    int       found;                         /* 0: there is none, and the rest is undefined */
    int64_t   bytes, error, time;
    uint32_t *choices;
} gck_solution;

/* Change options until no change of one region or of two is faster within the budgets, at most a few
 * times for each region.  Two regions are at most `reach` / options apart.  The plan stays within both
 * budgets, within which it is.  GCK_OK or GCK_E_MEMORY. */
int gck_exchange(const gck_chain *chain, int64_t budget, int64_t error_budget, int64_t reach, gck_solution *plan);

#endif
