/* waiting.h: saved tensors that wait, as they are, until it is known which node saves them. */
#ifndef GRADCKPT_WAITING_H
#define GRADCKPT_WAITING_H

#include "saved.h"

/* Of at most so many tensors the saving node is looked for, among so many nodes; one more, and
 * the oldest stays as it is. */
enum { GCK_WAITING_TENSORS = 64, GCK_WAITING_NODES = 1024 };

/* What becomes of one that waited.  node: it saves it; NULL: not known.  0 or -1. */
typedef int gck_settle(gck_saved *saved, PyObject *node);

/* A list's capsule, new reference: one of its own, or the one that blocks of this thread share. */
PyObject *gck_waiting_new(void);
PyObject *gck_waiting_of_thread(void);

/* The node with this number saves a tensor of so many values: those that wait for it learn it. */
void gck_waiting_note(PyObject *waiting, int64_t number, int64_t numel);

/* `saved`, of the node with its number, begins to wait, or (`settled`) is remembered as what has
 * been decided on: both until it dies.  0 or -1. */
int  gck_waiting_add(PyObject *waiting, gck_saved *saved, gck_settle *settle);
void gck_waiting_remember(PyObject *waiting, gck_saved *saved);

/* For a dying one. */
void gck_waiting_forget(gck_saved *saved);

/* Settle what this node and those behind it save, if their numbers are below `end`: the node that is
 * being made may be among them.  0 or -1. */
int gck_waiting_reach(PyObject *waiting, gck_state *state, PyObject *node, int64_t end, gck_settle *settle);

/* Settle what hooks of `saver` gave: nothing more will be known.  0 or -1. */
int gck_waiting_end(PyObject *waiting, const PyObject *saver, gck_settle *settle);

/* Borrowed: the one of this index that waits, or NULL behind the last; the settled one, or NULL,
 * below GCK_WAITING_TENSORS. */
gck_saved *gck_waiting_next(PyObject *waiting, int index);
gck_saved *gck_waiting_settled(PyObject *waiting, int index);

#endif
