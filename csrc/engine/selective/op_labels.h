/* op_labels.h: outputs that get a name after their operator has run: gradckpt.policies.name(). */
#ifndef GRADCKPT_OP_LABELS_H
#define GRADCKPT_OP_LABELS_H

#include "engine/selective/op_storage.h"

/* Remember an output of the call with that index that may get a name later in the forward. */
int gck_op_label_candidate(gck_op_storage *store, int line, Py_ssize_t index, PyObject *out);

/* x got a name; keep the call that made it if the name is listed.  0 or -1. */
int gck_op_label(gck_op_storage *store, PyObject *x, PyObject *name);

/* The forward is over, and its outputs are settled.  0, or -1 with what a warning raised. */
int gck_op_labels_finish(gck_op_storage *store);

#endif
