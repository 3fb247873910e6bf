/* exchange.h: a plan made faster by changing options of one region or of two. */
#ifndef GRADCKPT_EXCHANGE_H
#define GRADCKPT_EXCHANGE_H

#include "planner/front.h"

/* Change options until no such change is faster within the budgets, at most a few times for each
 * region.  Two regions are at most `work` / options apart.  The plan stays within both budgets,
 * within which it is.  GCK_OK or GCK_E_MEMORY. */
int gck_exchange(const gck_chain *chain, int64_t budget, int64_t error_budget, int64_t work, gck_solution *plan);

#endif
