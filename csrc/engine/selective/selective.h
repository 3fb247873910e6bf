/* selective.h: catches operators while a region runs, to keep their outputs or to replay them. */
#ifndef GRADCKPT_SELECTIVE_H
#define GRADCKPT_SELECTIVE_H

#include "engine/state.h"
#include "engine/selective/active_storage.h"
#include "engine/selective/op_storage.h"

/* Catch the named operators in this thread until the end; by_key 0: a mode catches them.  run: of
 * its region, or NULL: not known.  0 or -1. */
int  gck_selective_begin(gck_state *state, gck_active *active, gck_op_storage *store, int replay, int by_key,
                         const gck_run *run);
void gck_selective_end(gck_state *state, gck_active *active);

/* End a recompute that has not failed, and judge its calls; stopped: before its function ended.  0,
 * or -1 with a CheckpointError. */
int gck_selective_finish(gck_state *state, gck_active *active, int stopped);

/* 1: the operators that the store names may be caught on the key; 0: a mode has to catch them. */
int gck_catches_by_key(const gck_state *state, const gck_op_storage *store);

/* For Python: catcher(op), selective_key(), and for tests catch_by_mode(on). */
PyObject *gck_catcher(PyObject *module, PyObject *op);
PyObject *gck_selective_key(PyObject *module, PyObject *unused);
PyObject *gck_catch_by_mode(PyObject *module, PyObject *on);

#endif
