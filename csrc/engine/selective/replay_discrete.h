/* replay_discrete.h: which regions keep discrete outputs, and how torch's checkpoint inside one does, too. */
#ifndef GRADCKPT_REPLAY_DISCRETE_H
#define GRADCKPT_REPLAY_DISCRETE_H

#include "engine/state.h"
#include "engine/selective/active_storage.h"
#include "engine/selective/op_storage.h"

/* The one rule for which regions keep discrete outputs, for every kind of region, applied after its
 * inputs are packed and before its function runs: a region that may run again on restored values.
 * `own` is gck_plan's setting where one of its inputs became a payload, else 0; approximate: its
 * restored inputs may have other values.  Also included are
 * stores whose policy keeps outputs lossily, and everything inside such a region, in its forward
 * and in its recompute.  *store: what the region keeps for its policy, or NULL; it is made where
 * none exists and discrete outputs are kept.  0 or -1. */
int gck_region_replays_discrete(gck_state *state, int own, int approximate, gck_op_storage **store);

/* Make an active store of this thread keep discrete outputs from now on: a policy that is a
 * function has kept an output by this plan.  0 or -1. */
int gck_replay_discrete_from(gck_state *state, gck_op_storage *store, const gck_plan *plan);

/* Make torch's checkpoint, when it runs inside, keep discrete outputs as the store of `active`
 * does.  0 or -1. */
int gck_replay_discrete_announce(gck_state *state, gck_active *active);

/* For Python: replays_discrete(). */
PyObject *gck_replays_discrete_py(PyObject *module, PyObject *unused);

/* One more region (by 1) or one less (by -1) needs it; a pending exception survives.  0 or -1. */
int gck_replace_checkpoint(gck_state *state, int by);

/* For Python: replace_checkpoint(by). */
PyObject *gck_replace_checkpoint_py(PyObject *module, PyObject *by);

#endif
