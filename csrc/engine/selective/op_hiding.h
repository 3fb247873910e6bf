/* op_hiding.h: operators that stores do not see. */
#ifndef GRADCKPT_OP_HIDING_H
#define GRADCKPT_OP_HIDING_H

#include "engine/state.h"
#include "engine/selective/active_storage.h"

/* Make the active stores of this thread, from the innermost up to `last` (NULL: all), see more or
 * fewer operators. */
void gck_count_busy(gck_state *state, const gck_active *last, int by);

/* Hide the operators of this thread from the stores that are active now (by 1), or no longer (by -1). */
void gck_hide_from_active(gck_state *state, int by);

/* Hide operators that we call to keep or return an output from every region of this thread and from
 * every mode.  0, or -1 with the first exception. */
int gck_hide_begin(gck_state *state, PyObject **modes);
int gck_hide_end(gck_state *state, PyObject *modes);

#endif
