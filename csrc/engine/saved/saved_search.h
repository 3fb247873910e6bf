/* saved_search.h: the search for the nodes that save what waits, and for what amplifies an error of what they saved. */
#ifndef GRADCKPT_SAVED_SEARCH_H
#define GRADCKPT_SAVED_SEARCH_H

#include "engine/saved/saved_form.h"

/* Settle what this node, which has this number, and those behind it save, if their numbers are below
 * `end`, because the node that is being made may be among them.  What uses the node's result is
 * not known yet, so products behind it wait on.  *tracing: what gck_tracing() said, where it was asked.  0 or -1. */
int gck_saved_search(gck_saved_hooks *self, PyObject *node, int64_t number, int64_t end, int *tracing);

/* In a backward, before a tensor is restored of which the forward never saw what saves it: the node that runs now does.
 * Were it known, it would have been searched from.  0 or -1. */
int gck_saved_search_in_backward(gck_saved_hooks *self, const gck_saved_tensor *saved);

#endif
