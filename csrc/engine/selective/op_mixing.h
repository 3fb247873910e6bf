/* op_mixing.h: kept outputs beside restored values.
 *
 * An exact result beside restored values, or the reverse, is no small error where both should cancel: in the
 * formula of one node (x.amax() looks for its result in x), or in what follows (a kept sum under restored
 * exponentials).  Where inputs are restored a policy therefore keeps products only, and what is discrete;
 * where its own outputs are, nothing that the operator's node saves beside its arguments.  Which of torch's
 * operators these are its node types tell (gradckpt/_engine/op_mixing.py); of others it is seen when their
 * node saves. */
#ifndef GRADCKPT_OP_MIXING_H
#define GRADCKPT_OP_MIXING_H

#include "engine/state.h"
#include "engine/selective/op_policy.h"
#include "engine/selective/op_storage.h"

/* A gck_op_mixing; -1 with an exception. */
int gck_op_mixing_of(const gck_py *py, PyObject *op);

/* 1 when a backward may mix outputs that this rule keeps with restored values; 0. */
int gck_op_mixes(const gck_op_storage *store, const gck_op_rule *rule);

/* Warn that such a call runs again.  0 or -1. */
int gck_op_runs_again(const gck_py *py, PyObject *op);

/* `out` is kept of a call by this rule: what the node of the call saves next is looked at.  0 or -1. */
int gck_op_watch(gck_op_storage *store, const gck_op_rule *rule, PyObject *op, PyObject *out);

/* The forward of the store's region saves x.  0, or -1 with a RuntimeError. */
int gck_op_watch_save(gck_op_storage *store, PyObject *x);

#endif
