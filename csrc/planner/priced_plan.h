/* priced_plan.h: one plan within both budgets, by a price of error that is found for them. */
#ifndef GRADCKPT_PRICED_PLAN_H
#define GRADCKPT_PRICED_PLAN_H

#include "planner/front.h"
#include "planner/prices.h"

/* Improve a plan of a front with errors that is not exact, for these budgets, within which it is.
 *
 * The price is looked for at which plans with more error than the budget cost as much as plans
 * with less.  Where regions are alike, all of them would change their option at that price; so the
 * first regions have a slightly higher one and the others a slightly lower one, and their number is
 * looked for.  Last, options of one region or of two are changed until no change is better.
 * `price`: where the bound is best.  GCK_OK or GCK_E_MEMORY. */
int gck_priced_plan_improve(gck_front *front, int64_t budget, int64_t error_budget, gck_solution *plan,
                            gck_price *price);

#endif
