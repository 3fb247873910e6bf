/* priced_front.h: a front with errors, of plans that are the best for some price of error. */
#ifndef GRADCKPT_PRICED_FRONT_H
#define GRADCKPT_PRICED_FRONT_H

#include "planner/front.h"

/* Set the plans of a front whose exact labels end with region front->exact_from.  For each of about
 * 16 prices the chain is solved for bytes and time + price * error, with a quarter of the buckets;
 * and once for bytes and error alone, with all of them, so that it has the plan of fewest bytes for
 * each error.  GCK_OK or GCK_E_MEMORY. */
int gck_priced_front_solve(gck_front *front);

#endif
