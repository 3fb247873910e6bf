/* unseen_views.h: views of kept outputs that have version counters of their own (_unsafe_view,
 * unsafe_split): what is written into them, an output's own version does not show. */
#ifndef GRADCKPT_UNSEEN_VIEWS_H
#define GRADCKPT_UNSEEN_VIEWS_H

#include "engine/state.h"
#include "engine/selective/op_outputs.h"

/* 1 for an operator that makes such views of its first argument. */
int gck_makes_unseen_views(const gck_py *py, const PyObject *op);

/* x, a tensor or several, was just made by one: outputs that active stores of this thread keep in its memory
 * remember it.  0 or -1. */
int gck_note_unseen(gck_state *state, PyObject *x);

/* Find out whether the outputs of an entry were written into unseen.  1: their versions show what happened,
 * or nothing did; 0: they have changed; -1. */
int gck_unwritten(const gck_state *state, PyObject *entry);

/* A run of the store's region is over: what was written into unseen is not kept.  0 or -1. */
int gck_settle_outputs(gck_op_storage *store);

#endif
