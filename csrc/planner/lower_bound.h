/* lower_bound.h: how far a plan may be from the best. */
#ifndef GRADCKPT_LOWER_BOUND_H
#define GRADCKPT_LOWER_BOUND_H

#include "planner/planner.h"

/* No plan within both budgets takes less time than *bound.  `plan` is what gck_front_find() found
 * for them, and any plan is good: the bound is tighter the better it is.  GCK_OK or
 * GCK_E_MEMORY. */
int gck_lower_bound(const gck_front *front, int64_t plan, int64_t budget, int64_t error_budget, int64_t *bound);

#endif
