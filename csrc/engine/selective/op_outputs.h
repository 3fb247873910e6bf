/* op_outputs.h: what is kept of one call of an operator, and how it is returned. */
#ifndef GRADCKPT_OP_OUTPUTS_H
#define GRADCKPT_OP_OUTPUTS_H

#include "torch/draws.h"
#include "engine/state.h"
#include "engine/selective/op_storage.h"

extern PyType_Spec gck_op_output_spec;

/* Keep the outputs of a call in its place: a tensor as a detached alias or a payload (of several
 * return values only the first), anything else by reference.  0 or -1. */
int gck_op_output_keep(gck_op_storage *store, const gck_call *call, PyObject *out, const gck_plan *plan);
/* Keep a discrete output in its form, or as copies; bool as bits. */
int gck_op_output_keep_discrete(gck_op_storage *store, const gck_call *call, PyObject *form, PyObject *out);

/* Keep what the call drew from a generator, so that its replay leaves the generator where the call
 * did.  0 or -1. */
int gck_op_output_note_draw(gck_op_storage *store, const gck_call *call, gck_draw *draw);

/* Remember which call a discrete output comes from, where `by_call`.  0 or -1. */
int gck_op_output_note_call(gck_op_storage *store, const gck_call *call);
/* 1: the entry at its place is a discrete output of this call; 0: of another call; -1; otherwise
 * `unknown`. */
int gck_op_output_is_of_call(gck_op_storage *store, const gck_call *call, int unknown);

/* New reference: the kept outputs of that call; its generator is set to its state after the call.
 * lasting: the entry stays, also in a store that serves one backward. */
PyObject *gck_op_output_give(gck_op_storage *store, const gck_call *call, PyObject *entry, int lasting);

#endif
