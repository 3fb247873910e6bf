/* rounding.h: the noise of a tensor that is rounded stochastically.
 *
 * Numbers come from a counter.  Outside any region it is the module's, whose steps end with a
 * backward.  While a region runs, in the forward or again, its thread counts from where the region
 * began, so that tensors encoded inside get the same noise both times, whatever other threads do
 * meanwhile. */
#ifndef GRADCKPT_ROUNDING_H
#define GRADCKPT_ROUNDING_H

#include "gradckpt.h"
#include "engine/state.h"

/* Store the noise of the next tensor in *dither; NULL: to nearest.  once: a run of the region after
 * the forward will not request it again. */
const gck_dither *gck_next_dither(gck_state *state, const gck_plan *plan, int once, gck_dither *dither);

/* Where the noise inside a new region begins. */
gck_rounding gck_rounding_of_region(gck_state *state);

/* A region begins to run on this thread and counts in *own, a copy of its beginning.  Returns what is swapped in again
 * when it has run. */
gck_rounding *gck_rounding_swap(gck_rounding *own);

#endif
