/* selective_mode.h: the two modes of a selective region: type gradckpt._C.Context. */
#ifndef GRADCKPT_SELECTIVE_MODE_H
#define GRADCKPT_SELECTIVE_MODE_H

#include "engine/state.h"
#include "engine/selective/op_storage.h"

extern PyType_Spec gck_context_spec;

/* Borrowed: the store of a context; NULL: it is not one of ours. */
gck_op_storage *gck_context_store(const gck_state *state, PyObject *context);

/* For Python: selective_name(x, name, modes). */
PyObject *gck_selective_name(PyObject *module, PyObject *args);

#endif
