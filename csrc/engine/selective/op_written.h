/* op_written.h: writes into kept outputs that their versions do not show.
 *
 * Some views of torch's (_unsafe_view, unsafe_split) have a version counter of their own, and kernels
 * write below the key that counts.  Such views of a kept output are remembered; before an operator
 * writes into one, the kept output is copied. */
#ifndef GRADCKPT_OP_WRITTEN_H
#define GRADCKPT_OP_WRITTEN_H

#include "engine/state.h"
#include "engine/selective/op_storage.h"

/* What an operator that keeps nothing may do to kept outputs. */
typedef enum { GCK_READS, GCK_WRITES, GCK_VIEWS_UNSEEN } gck_op_effect;
gck_op_effect gck_op_effect_of(const gck_py *py, PyObject *op);

/* 1 when active stores of this thread keep outputs in the memory of x, a tensor or a list of them, or may
 * still do so; 0; -1. */
int gck_is_kept_memory(gck_state *state, PyObject *x);

/* An operator with this effect is about to run on x, its first argument: 1 when kept outputs lie in
 * the memory of x; 0; -1.  And afterwards, if it makes views unseen: they are views of x with version counters of their
 * own.  0 or -1. */
int gck_effect_begin(gck_state *state, gck_op_effect effect, PyObject *x);
int gck_effect_end(gck_state *state, PyObject *x, PyObject *out);

/* A run of the store's region is over: settle what is kept.  0 or -1. */
int gck_settle_outputs(gck_op_storage *store);

#endif
