/* op_outputs.h: what is kept of one call of an operator, and how it is returned. */
#ifndef GRADCKPT_OP_OUTPUTS_H
#define GRADCKPT_OP_OUTPUTS_H

#include "torch/draws.h"
#include "engine/state.h"
#include "engine/selective/op_storage.h"

extern PyType_Spec gck_op_output_spec;

/* New reference: what is kept of the outputs of a call: a tensor as a detached alias or a payload (of
 * several return values only the first), anything else by reference. */
PyObject *gck_op_output_keep(gck_op_storage *store, PyObject *out, const gck_plan *plan);
/* The same of a discrete output, in its form, or as copies; bool as bits. */
PyObject *gck_op_output_keep_discrete(gck_op_storage *store, const gck_call *call, PyObject *form, PyObject *out);

/* Keep what the call drew from a generator, so that its replay leaves the generator where the call
 * did.  0 or -1. */
int gck_op_output_note_draw(gck_op_storage *store, Py_ssize_t index, gck_draw *draw);

/* New reference: the outputs of a call, from its entry; its generator is set to its state after
 * what it drew, or NULL. */
PyObject *gck_op_output_give(gck_op_storage *store, const gck_call *call, PyObject *entry, PyObject *drawn);

#endif
