/* op_joint.h: kept outputs that the operator's own backward reads beside its arguments.
 *
 * Exact results beside restored arguments, or the reverse, are no small error: what should cancel in the
 * node's formula does not.  Where that may happen such an operator runs again (its arguments may be
 * restored) or its outputs are kept exactly.  Which of torch's operators these are its node types tell
 * (gradckpt/_engine/joint_saves.py); of others it is seen when their node saves. */
#ifndef GRADCKPT_OP_JOINT_H
#define GRADCKPT_OP_JOINT_H

#include "engine/state.h"
#include "engine/selective/active_storage.h"
#include "engine/selective/op_policy.h"
#include "engine/selective/op_storage.h"

/* What the node of this operator saves.  -1 with an exception. */
int gck_op_joint_of(const gck_py *py, PyObject *op);

/* 1 when the backward of a call would mix outputs that this rule keeps with restored arguments; 0.  active:
 * where the operator was caught; NULL: what its node saves is not seen. */
int gck_op_mixes(const gck_active *active, const gck_op_storage *store, const gck_op_rule *rule);

/* Warn that such a call runs again.  0 or -1. */
int gck_op_runs_again(const gck_py *py, PyObject *op);

/* `out` is kept of a call by this rule: what the node of the call saves next is looked at.  0 or -1. */
int gck_op_watch(gck_op_storage *store, const gck_op_rule *rule, PyObject *op, PyObject *out);

/* The forward of the store's region saves x.  0, or -1 with a RuntimeError. */
int gck_op_watch_save(gck_op_storage *store, PyObject *x);

#endif
