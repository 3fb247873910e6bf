/* restored.h: an argument of the recompute, made of what the forward kept. */
#ifndef GRADCKPT_RESTORED_H
#define GRADCKPT_RESTORED_H

#include "engine/state.h"
#include "engine/payload/batch.h"
#include "engine/payload/packed.h"

/* New reference: the argument for the recompute.  Its values may be deferred in `batch`.  inputs:
 * NULL, or a list to which its tensors are added, which then have no history. */
PyObject *gck_packed_restore(gck_state *state, const gck_packed *entry, gck_batch *batch, PyObject *inputs);

#endif
