/* region.h: what every form of checkpointed region does: keep its arguments, make them
 * again, run its function. */
#ifndef GRADCKPT_REGION_H
#define GRADCKPT_REGION_H

#include "frame.h"

/* Fill the frame from a call: entries of all arguments, ambient state, the store of what
 * operators decide.  Before the function runs, which may change its arguments in place.
 * *fed_args, *fed_kwargs: what the function gets, owned by the caller also on failure; kwargs
 * may be NULL.  exact: as torch.  0 or -1. */
int gck_region_keep(gck_frame *frame, gck_packing *packing, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs,
                    int preserve_rng, int exact, PyObject **fed_args, PyObject **fed_kwargs);

/* The arguments again, new references; *kwargs may be NULL.  saved: an iterator over what the node
 * has saved, NULL without one.  inputs: NULL, or a list that gets each tensor among them; such a
 * tensor has no history.  0 or -1. */
int gck_region_restore(gck_frame *frame, PyObject *saved, PyObject *inputs, PyObject **args, PyObject **kwargs);

/* Saved-tensor hooks that are active while the function runs. */
typedef struct {
    PyMethodDef *pack, *unpack;
    PyObject    *self;             /* borrowed: what the two are bound to                  */
} gck_hooks;

/* New reference: what the function returns for these arguments.  Its operators are caught:
 * recorded, or replayed.  hooks, context: NULL for none. */
PyObject *gck_region_call(gck_frame *frame, const gck_hooks *hooks, PyObject *context, PyObject *args,
                          PyObject *kwargs, int replay);

/* Count the backward, and say so to Python, when a region is the first that it meets.  0 or -1. */
int gck_region_note_step(gck_state *state);

#endif
