/* selective.h: catches operators while a region runs, to keep their outputs or to replay them. */
#ifndef GRADCKPT_SELECTIVE_H
#define GRADCKPT_SELECTIVE_H

#include "engine/state.h"
#include "engine/selective/active_storage.h"
#include "engine/selective/op_storage.h"
#include "engine/selective/op_written.h"

/* Catch the named operators in this thread until the end; by_key 0: a mode catches them.  saved: how
 * many tensors the region has saved, or NULL.  0 or -1. */
int  gck_selective_begin(gck_state *state, gck_active *active, gck_op_storage *store, int replay, int by_key,
                         const Py_ssize_t *saved);
void gck_selective_end(gck_state *state, gck_active *active);

/* End a recompute that has not failed, and judge its calls; stopped: before its function ended.  0,
 * or -1 with a CheckpointError. */
int gck_selective_finish(gck_state *state, gck_active *active, int stopped);

/* An operator with this effect is about to run on x, its first argument: 1 when kept outputs lie in
 * the memory of x; 0; -1.  And afterwards, if it makes views unseen.  0 or -1. */
int gck_effect_begin(gck_state *state, gck_op_effect effect, PyObject *x);
int gck_effect_end(gck_state *state, PyObject *x, PyObject *out);

/* Run one call that belongs to that line of the store and keep the outputs that the policy names;
 * or return the outputs of the same call of the forward, or run it again.  New reference. */
PyObject *gck_record_call(const gck_active *active, gck_op_storage *store, int line, gck_call *call);
PyObject *gck_replay_call(gck_active *active, gck_call *call);

/* 1: the operators that the store names may be caught on the key; 0: a mode has to catch them. */
int gck_catches_by_key(const gck_state *state, const gck_op_storage *store);

/* Hide the operators of this thread from its active stores (by 1), or no longer (by -1). */
void gck_selective_hide(gck_state *state, int by);

/* For Python: catcher(op), selective_key(), and for tests catch_by_mode(on). */
PyObject *gck_catcher(PyObject *module, PyObject *op);
PyObject *gck_selective_key(PyObject *module, PyObject *unused);
PyObject *gck_catch_by_mode(PyObject *module, PyObject *on);

#endif
