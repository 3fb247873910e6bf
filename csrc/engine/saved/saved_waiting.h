/* saved_waiting.h: saved tensors that wait, uncompressed, until the node that saves them is
 * seen. */
#ifndef GRADCKPT_SAVED_WAITING_H
#define GRADCKPT_SAVED_WAITING_H

#include "torch/objects.h"
#include "engine/state.h"
#include "engine/saved/saved_form.h"

/* Add `saved` to the list, until it dies or many others have followed.  0 or -1. */
int gck_saved_waiting_add(PyObject *waiting, gck_saved_tensor *saved);

/* Record where and on which stream it was saved. */
void gck_saved_waiting_at(gck_saved_tensor *saved, const gck_tensor *view);

/* 1 when the search may be put off: few values wait, all on a device, where those that are settled
 * together share a launch.  What waits meanwhile is `late`. */
int gck_saved_waiting_may_last(PyObject *waiting);

/* Settle a tensor that waits, or was kept for a Function, in the form that this node needs; exactly: without error.
 * node NULL: it is not known, so the tensor stays, without its graph, of which it may be a result; go_on: and waits
 * again.  batch: where encoding may be deferred, or NULL.  0 or -1. */
int gck_saved_waiting_settle(gck_saved_tensor *saved, PyObject *node, int exactly, int go_on, gck_batch *batch);

/* Keep what this node of a Function has saved, and what was kept as it is until the node was known, as the node needs
 * it; exactly: without error.  0 or -1. */
int gck_saved_function_settle(gck_state *state, PyObject *node, int exactly, gck_batch *batch);

#endif
