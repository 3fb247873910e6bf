/* checkpoint_replacement.h: torch's checkpoint behaves as gradckpt's while a region keeps discrete
 * outputs. */
#ifndef GRADCKPT_CHECKPOINT_REPLACEMENT_H
#define GRADCKPT_CHECKPOINT_REPLACEMENT_H

#include "engine/state.h"

/* One more region (by 1) or one less (by -1) needs it; a pending exception survives.  0 or -1. */
int gck_replace_checkpoint(gck_state *state, int by);

/* For Python: replace_checkpoint(by). */
PyObject *gck_replace_checkpoint_py(PyObject *module, PyObject *by);

#endif
