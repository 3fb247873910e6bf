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

#endif
