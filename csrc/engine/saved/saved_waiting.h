/* saved_waiting.h: the saved tensors that a block knows: those that wait, uncompressed, until the node
 * that saves them is seen, and the latest of those that no longer wait. */
#ifndef GRADCKPT_SAVED_WAITING_H
#define GRADCKPT_SAVED_WAITING_H

#include "engine/saved/saved_tensor.h"

/* The limits of the search: at most so many tensors wait, and so many nodes are searched.  One more
 * tensor, and the oldest stays uncompressed. */
enum { GCK_WAITING_TENSORS = 64, GCK_WAITING_NODES = 1024 };

/* New reference: a list's capsule, of its own or shared by the blocks of this thread. */
PyObject *gck_saved_waiting_new(void);
PyObject *gck_saved_waiting_of_thread(void);

/* The number of the node that this thread made last, -1 with an exception. */
int64_t gck_last_node_number(const gck_py *py);

/* Add `saved` to the list, until it dies or many others have followed.  0 or -1. */
int gck_saved_waiting_add(PyObject *waiting, gck_saved_tensor *saved);

/* Remove a dying one. */
void gck_saved_waiting_forget(gck_saved_tensor *saved);

/* Borrowed: the one with this index, oldest first; NULL behind the last, before 2 *
 * GCK_WAITING_TENSORS. */
gck_saved_tensor *gck_saved_waiting_known(PyObject *waiting, int index);

/* Settle what this node and those behind it save, if their numbers are below `end`, because the
 * node that is being made may be among them.  0 or -1. */
int gck_saved_waiting_reach(PyObject *waiting, gck_state *state, PyObject *node, int64_t end);

#endif
