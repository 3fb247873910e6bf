/* priced_front.h: a front with errors, of plans that are the best for some price of error. */
#ifndef GRADCKPT_PRICED_FRONT_H
#define GRADCKPT_PRICED_FRONT_H

#include "planner/front.h"

/* Set the plans of a front whose exact labels end with region front->exact_from, all of one pass.
 *
 * For each of about 16 prices the chain is solved for bytes and time + price * error, with a
 * quarter of the buckets.  For two neighbouring prices, further passes go on from some regions of
 * the lower price's pass with the higher price: that fills the gap between them.  It is wide where
 * regions are alike and would all change their option at one price, and there are as many more
 * passes as that takes away errors.  The prices depend on the chain alone, and so do the plans.
 *
 * `range`: the most bytes between two labels of a region.  GCK_OK or GCK_E_MEMORY. */
int gck_priced_front_solve(gck_front *front, int64_t range);

#endif
