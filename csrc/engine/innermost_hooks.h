/* innermost_hooks.h: whose saved-tensor hooks are on top of torch's stack.
 *
 * They alone receive what autograd saves.  That a region runs does not mean that its hooks are the
 * innermost ones: torch's checkpoint, or hooks of the user's, may lie inside it. */
#ifndef GRADCKPT_INNERMOST_HOOKS_H
#define GRADCKPT_INNERMOST_HOOKS_H

#include "engine/state.h"

typedef enum {
    GCK_HOOKS_NONE,
    GCK_HOOKS_REGION,          /* of a region of ours, in its forward or its recompute */
    GCK_HOOKS_TORCHS_REGION,   /* of torch's checkpoint, likewise                      */
    GCK_HOOKS_OTHER,
} gck_hooks_owner;

/* New reference: the innermost hooks of this thread as a pair, or None; NULL with an exception.
 * *owner: whose they are.  *self: the Frame or Recompute of a region of ours, borrowed from the
 * pair; else NULL. */
PyObject *gck_innermost_hooks(const gck_state *state, gck_hooks_owner *owner, PyObject **self);

/* New reference: the innermost pair of this thread beneath those of `of`, a frame or a recompute; NULL: of every
 * checkpoint.  None: there is none, or hooks are disabled; NULL with an exception.  *owner: whose it is.  In C,
 * so that no signal handler runs while hooks above it are off. */
PyObject *gck_hooks_beneath(const gck_state *state, const PyObject *of, gck_hooks_owner *owner);

/* New reference: the hooks of the user's that see what a policy keeps; None.  NULL with an exception.  shown: the
 * option respect_saved_tensors_hooks; -1: as torch, none, with its warning.  alone: the pack hook above none. */
PyObject *gck_hooks_that_see(const gck_state *state, const PyObject *alone, int shown);

/* Frames and Recomputes are pack hooks that torch's own contexts tell from a user's by two attributes, as those
 * of torch's checkpoint: `_checkpoint_internal`, and `_user_hooks`, which they read of the innermost hook. */
extern PyGetSetDef gck_hook_getset[];

#endif
