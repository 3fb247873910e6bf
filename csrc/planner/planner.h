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
 * the last region to the first and depends on neither budget, therefore a larger budget never gives
 * a slower plan.
 *
 * While a region has at most `buckets` labels, all of them are kept and the front is exact.  After
 * that labels are thinned to one per bucket of slack.  A label holds true bytes and a true error, so
 * each remaining plan is realisable as it stands; gck_lower_bound() says how far it may be from the
 * best.
 *
 * Cost, with R regions, N options and B buckets:
 *     bytes alone   at most R * N * B steps, 8 * R * B bytes; the bound another R * N * 2B steps
 *     with errors   B / 4 buckets of slack times at most 64 of error: R * N * 16 B steps and
 *                   128 * R * B bytes; the bound a dozen of those for bytes alone
 *
 * Integers only.  Among plans of equal time the one that needs fewer bytes wins, then the one of
 * smaller error, then that with the earlier option in the earlier region that was compared: the same
 * plan on every machine.  No state outlives a call, and threads do not share any. */
#ifndef GRADCKPT_PLANNER_H
#define GRADCKPT_PLANNER_H

#include "planner/labels.h"

enum { GCK_LEAST_BUCKETS = 64, GCK_MOST_BUCKETS = 1 << 18 };

/* The option that a label takes, and the label of the next region that it extends. */
typedef struct {
    uint32_t from, option;
} gck_step;

/* All plans of a chain that are worth having. */
typedef struct {
    const gck_chain *chain;                  /* borrowed                                              */
    int64_t          buckets;
    gck_labels       plans;                  /* of region 0; none if no budget is large enough        */
    gck_step       **steps;                  /* for each region after the first, those of its labels  */
    gck_labels       exact;                  /* the last labels of which none is missing              */
    int64_t          exact_from;             /* their region; 0: the front is exact                   */
} gck_front;

/* GCK_OK, GCK_E_RANGE or GCK_E_MEMORY; front is NULL unless GCK_OK.  The chain and its tables must
 * outlive the front. */
int  gck_front_new(const gck_chain *chain, int64_t buckets, gck_front **front);
void gck_front_free(gck_front *front);       /* NULL: nothing */

/* The index of the fastest plan within both budgets, or -1. */
int64_t gck_front_find(const gck_front *front, int64_t budget, int64_t error_budget);

/* The smallest budget for which there is a plan within the error budget: exact if the front is, or
 * without errors; else sound.  GCK_UNAVAILABLE: none. */
int64_t gck_front_least(const gck_front *front, int64_t error_budget);

/* The option of each region, for the plan of this index. */
void gck_front_choices(const gck_front *front, int64_t plan, uint32_t *choices);

#endif
