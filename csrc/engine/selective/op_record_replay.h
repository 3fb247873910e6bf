/* op_record_replay.h: a caught call of an operator in the forward of a region, and in its recompute. */
#ifndef GRADCKPT_OP_CALLS_H
#define GRADCKPT_OP_CALLS_H

#include "engine/selective/active_storage.h"
#include "engine/selective/op_storage.h"

/* Run one call that belongs to that line of the store and keep the outputs that the policy names;
 * or return the outputs of the same call of the forward, or run it again.  New reference. */
PyObject *gck_record_call(const gck_active *active, gck_op_storage *store, int line, gck_call *call);
PyObject *gck_replay_call(gck_active *active, gck_call *call);

#endif
