/* region.h: what every form of checkpointed region does: keep its arguments, restore them, run its
 * function. */
#ifndef GRADCKPT_REGION_H
#define GRADCKPT_REGION_H

#include "engine/state.h"
#include "engine/payload/packed.h"
#include "engine/region/frame.h"
#include "engine/region/running.h"

/* Fill the frame from a call: entries of all arguments, ambient state, the store of discrete
 * outputs.  It comes before the function runs, which may change its arguments in place.  *fed_args,
 * *fed_kwargs: what the function gets, owned by the caller also on failure; kwargs may be NULL.
 * exact: as torch.  0 or -1. */
int gck_region_keep(gck_frame *frame, gck_packing *packing, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs,
                    int preserve_rng, int exact, PyObject **fed_args, PyObject **fed_kwargs);

/* Restore the arguments, as new references; *kwargs may be NULL. saved: an iterator over the node's
 * saved tensors, NULL without a node.  inputs: NULL, or a list to which each tensor among them is
 * added; such a tensor has no history.  0 or -1. */
int gck_region_restore(gck_frame *frame, PyObject *saved, PyObject *inputs, PyObject **args, PyObject **kwargs);

/* New reference: the function's result for these arguments.  Its operators are caught, and recorded
 * or replayed. hooks, context: NULL for none. */
PyObject *gck_region_call(gck_frame *frame, const gck_hooks *hooks, PyObject *context, PyObject *args,
                          PyObject *kwargs, int replay);

/* Log, once in a process, that a backward with create_graph=True reads restored values.  0 or -1. */
int gck_region_note_create_graph(const gck_frame *frame);

/* Count the backward, and notify Python, when a region is the first that it reaches.  0 or -1. */
int gck_region_note_step(gck_state *state);

#endif
