/* op_catching.h: catches operators around a region. */
#ifndef GRADCKPT_OP_CATCHING_H
#define GRADCKPT_OP_CATCHING_H

#include "engine/state.h"
#include "engine/selective/active_storage.h"
#include "engine/selective/op_storage.h"

/* Catch the operators that the store names until the end, on the key; by a mode of ours where other
 * modes watch, or where the policy is a function.  store NULL: nothing is caught.  run: of the
 * region, or NULL: not known.  0 or -1. */
typedef struct {
    gck_active active;
    int        by_key;
    PyObject  *mode;
} gck_op_catching;
int gck_op_catching_begin(gck_state *state, gck_op_catching *c, gck_op_storage *store, PyObject *policy_fn, int replay,
                          const gck_run *run);
int gck_op_catching_end(gck_state *state, gck_op_catching *c);

#endif
