/* waiting.h: the saved tensors that a block knows: those that wait, as they are, until it is seen which
 * node saves them, and the latest of those that do no longer. */
#ifndef GRADCKPT_WAITING_H
#define GRADCKPT_WAITING_H

#include "saved.h"

/* Of at most so many tensors the saving node is looked for, among so many nodes; one more, and
 * the oldest stays as it is. */
enum { GCK_WAITING_TENSORS = 64, GCK_WAITING_NODES = 1024 };

/* A list's capsule, new reference: one of its own, or the one that blocks of this thread share. */
PyObject *gck_waiting_new(void);
PyObject *gck_waiting_of_thread(void);

/* The number of the node that this thread made last, -1 with an exception. */
int64_t gck_last_node_number(const gck_py *py);

/* `saved` is known from now on, until it dies or many others have followed.  0 or -1. */
int gck_waiting_add(PyObject *waiting, gck_saved *saved);

/* For a dying one. */
void gck_waiting_forget(gck_saved *saved);

/* Borrowed: the one of this index, oldest first; NULL behind the last, before 2 * GCK_WAITING_TENSORS. */
gck_saved *gck_waiting_known(PyObject *waiting, int index);

/* Settle what this node and those behind it save, if their numbers are below `end`: the node that is
 * being made may be among them.  0 or -1. */
int gck_waiting_reach(PyObject *waiting, gck_state *state, PyObject *node, int64_t end);

#endif
