/* lower_bound.h: how far a plan may be from the best. */
#ifndef GRADCKPT_LOWER_BOUND_H
#define GRADCKPT_LOWER_BOUND_H

#include "planner/front.h"
#include "planner/prices.h"

/* No plan within both budgets takes less time than *bound.  Any such plan and any price of error is
 * good: the bound is tighter the better they are.  GCK_OK or GCK_E_MEMORY. */
int gck_lower_bound(const gck_front *front, const gck_solution *plan, int64_t budget, int64_t error_budget,
                    gck_price price, int64_t *bound);

#endif
