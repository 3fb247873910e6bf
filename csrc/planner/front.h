/* front.h: all plans of a chain that are worth having, and how each was made. */
#ifndef GRADCKPT_FRONT_H
#define GRADCKPT_FRONT_H

#include "planner/labels.h"

/* The option that a label takes, and the label of the next region that it extends. */
typedef struct {
    uint32_t from, option;
} gck_step;

/* One pass over regions [0, end): for each after the first, the steps of its labels.  What they
 * extend at region `end` is of pass 0, which has all regions. */
typedef struct {
    gck_step **steps;                        /* end; malloc, and so is each */
    int64_t    end;
} gck_pass;

/* Where a plan goes on after region 0: a label of region 1, or of the region at which the pass ends. */
typedef struct {
    uint32_t from, pass;
} gck_end;

typedef struct {
    const gck_chain *chain;                  /* borrowed */
    int64_t          buckets;
    gck_labels       plans;                  /* of region 0; none if no budget is large enough */
    gck_pass        *passes;                 /* malloc */
    int64_t          n_passes;
    gck_end         *ends;                   /* a plan's `from` is a place here; NULL: of pass 0; malloc */
    gck_labels       exact;                  /* the last labels of which none is missing */
    int64_t          exact_from;             /* their region; 0: the front is exact      */
    int64_t          range;                  /* the most bytes between two labels of a region */
} gck_front;

/* A plan: the budget that it needs, the sums of its errors and times, the option of each region. */
typedef struct {
    int       found;                         /* 0: there is none, and the rest is undefined */
    int64_t   bytes, error, time;
    uint32_t *choices;
} gck_solution;

void gck_front_free(gck_front *front);       /* NULL: nothing */

/* Begin a pass over regions [0, end).  GCK_OK or GCK_E_MEMORY. */
int gck_front_add_pass(gck_front *front, int64_t end);

void gck_front_drop_pass(gck_front *front);  /* the last one */

/* Write down how the labels of a region were made, in the last pass.  GCK_OK or GCK_E_MEMORY. */
int gck_front_keep_steps(gck_front *front, int64_t region, const gck_labels *labels);

/* The index of the fastest plan within both budgets, or -1. */
int64_t gck_front_find(const gck_front *front, int64_t budget, int64_t error_budget);

/* The smallest budget for which there is a plan within the error budget: exact if the front is, or
 * without errors; else sound.  GCK_UNAVAILABLE: none. */
int64_t gck_front_least(const gck_front *front, int64_t error_budget);

/* The option of each region for a label of region 0 of a pass, and for the plan of this index. */
void gck_front_choices_from(const gck_front *front, const gck_label *label, uint32_t pass, uint32_t *choices);
void gck_front_choices(const gck_front *front, int64_t plan, uint32_t *choices);

#endif
