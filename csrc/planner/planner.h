/* planner.h: which option each region takes, for every budget at once.
 *
 * A chain of regions runs forward and then backward.  Region l takes one of its options o:
 * kept[l][o] bytes are alive from its forward to its backward, and at its highest point need[l][o]
 * bytes are alive beyond those that the regions before it keep.  With R(l) the sum of kept up to
 * region l, a plan fits a budget M if R(l - 1) + need[l][o] <= M for every region, and
 * R(L) + last_need <= M for what follows the last one.  The best plan has the least sum of time,
 * among those whose sum of error is within the error budget.
 *
 * Let the slack s of region l be M - R(l - 1).  The least time from there on is
 *     f(l, s) = min over o with need <= s of time + f(l + 1, s - kept)
 * and f(1, M) is the answer for every budget M.  f is a step function, so a list of labels (bytes,
 * time) holds it: the true bytes that a choice of options needs, and its time.  Solving goes from
 * the last region to the first and looks at neither budget, so the plans for all budgets are found
 * in one front, and a larger budget never gives a slower plan.
 *
 * While a region has at most `buckets` labels, all of them are kept and the front is exact; with
 * errors a label has its error, too.  After that labels are thinned to one per bucket of slack, and
 * with errors solved for some prices of error.  A label holds true bytes and a true
 * error, so each remaining plan is realisable as it stands, and the one of fewest bytes always
 * remains; a lower bound says how far a plan may be from the best.
 *
 * Cost, with R regions, N options and B buckets:
 *     bytes alone   at most R * N * B steps, 8 * R * B bytes; a bound as many as 1.5 times the steps
 *     with errors   about 16 passes of B / 4 buckets, and at most 35 of B: 40 * R * N * B steps, 45 *
 *                   R * B bytes; a bound 2 of those for bytes alone
 *
 * Integers only.  Among equally fast plans of the front the one that needs fewest bytes wins;
 * labels that are equal in all take the earlier option.  The same tables give the same plan on every
 * machine.  No state outlives a call, and threads share none. */
#ifndef GRADCKPT_PLANNER_H
#define GRADCKPT_PLANNER_H

#include "planner/chain.h"

enum { GCK_LEAST_BUCKETS = 64, GCK_MOST_BUCKETS = 1 << 18 };
enum { GCK_OCTAVES = 7, GCK_MOST_PASSES = 2 * GCK_OCTAVES + 5 };   /* of prices, on each side of the typical one */

/* The option that a label takes, and the label of the next region that it extends. */
typedef struct {
    uint32_t from, option;
} gck_step;

/* All plans of a chain that are worth having, and how each was made. */
typedef struct {
    const gck_chain *chain;                  /* borrowed */
    gck_sums         sums;
    int64_t          buckets;
    gck_option      *options;                /* of one region; malloc */
    gck_labels       plans;                  /* of region 0; none if no budget is large enough */
    gck_step       **passes[GCK_MOST_PASSES];/* of each region the steps of its labels, or NULL: those of pass 0;
                                              * malloc, and so are all steps */
    int              n_passes;
    gck_labels       exact;                  /* the last labels of which none is missing */
    int64_t          exact_from;             /* their region; 0: the front is exact      */
    int64_t          range;                  /* the most bytes between two labels of a region */
} gck_front;

/* GCK_OK, GCK_E_RANGE or GCK_E_MEMORY; front is NULL unless GCK_OK.  The chain and its tables must
 * outlive the front. */
int  gck_front_new(const gck_chain *chain, int64_t buckets, gck_front **front);
void gck_front_free(gck_front *front);       /* NULL: nothing */

/* Find the fastest plan within both budgets, and a time below which there is none.  plan->choices
 * has room for all regions.  GCK_OK or GCK_E_MEMORY. */
int gck_front_plan(gck_front *front, int64_t budget, int64_t error_budget, gck_solution *plan, int64_t *bound);

/* The smallest budget for which there is a plan within the error budget: exact if the front is, or
 * without errors; else sound.  GCK_UNAVAILABLE: none. */
int64_t gck_front_least(const gck_front *front, int64_t error_budget);

#endif
