/* priced_pass.h: a pass over the thinned regions of a chain, for bytes and time + price * error. */
#ifndef GRADCKPT_PRICED_PASS_H
#define GRADCKPT_PRICED_PASS_H

#include "planner/front.h"
#include "planner/prices.h"
#include "planner/slack_grid.h"

typedef struct {
    gck_front     *front;                    /* borrowed */
    gck_slack_grid grid;
    gck_option    *options;                  /* malloc, and so is the rest */
    gck_labels     labels, now;              /* of region 0 after a pass; their time is priced */
    int64_t       *times, *now_times;        /* their true times */
    uint32_t      *origins;                  /* which exact label each of the first labels is */
} gck_pricer;

/* `range`: the most bytes between two labels of a region.  GCK_OK or GCK_E_MEMORY.  Give it back in
 * either case. */
int  gck_pricer_init(gck_pricer *pricer, gck_front *front, int64_t buckets, int64_t range);
void gck_pricer_free(gck_pricer *pricer);

/* Extend the front's exact labels to region 0, which adds a pass to the front.  Regions before
 * `change` have the price `before`, the others `after`.  `most`: no option has an error that is
 * larger than the smallest of its region by more.  GCK_OK or GCK_E_MEMORY. */
int gck_pricer_run(gck_pricer *pricer, gck_price before, gck_price after, int64_t change, int64_t most);

#endif
