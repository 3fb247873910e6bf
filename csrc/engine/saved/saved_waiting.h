/* saved_waiting.h: saved tensors that wait, uncompressed, until the node that saves them is
 * seen. */
#ifndef GRADCKPT_SAVED_WAITING_H
#define GRADCKPT_SAVED_WAITING_H

#include "torch/objects.h"
#include "engine/state.h"
#include "engine/saved/saved_tensor.h"

/* The number of the node that this thread made last, -1 with an exception. */
int64_t gck_last_node_number(const gck_py *py);

/* Add `saved` to the list, until it dies or many others have followed.  0 or -1. */
int gck_saved_waiting_add(PyObject *waiting, gck_saved_tensor *saved);

/* Settle a waiting tensor in the form its node needs. node NULL: the node is not known, and the
 * tensor stays, without its graph, of which it may be a result; go_on: and waits again.
 * 0 or -1. */
int gck_saved_waiting_settle(gck_saved_tensor *saved, PyObject *node, int go_on);

/* Settle what this node and those behind it save, if their numbers are below `end`, because the
 * node that is being made may be among them.  0 or -1. */
int gck_saved_waiting_reach(PyObject *waiting, gck_state *state, PyObject *node, int64_t end);

#endif
