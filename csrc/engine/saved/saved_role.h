/* saved_role.h: the form that suffices for the node which saves a tensor. */
#ifndef GRADCKPT_SAVED_ROLE_H
#define GRADCKPT_SAVED_ROLE_H

#include "torch/input.h"
#include "engine/saved/saved_formats.h"
#include "engine/saved/saved_node.h"

/* The form of an input of the node, for which a pack hook returned `packed`; of a Function's node, also of a result.
 * Exact, where no row and no rule matches.  0 or -1. */
int gck_saved_as_input(gck_state *state, const gck_saved_formats *formats, PyObject *node, gck_saved_tensor *packed,
                       gck_input *in, gck_saved_as *as);

/* The form of the node's own result, which it is about to save.  0 or -1. */
int gck_saved_as_result(gck_state *state, const gck_saved_formats *formats, PyObject *node, gck_input *in,
                        gck_saved_as *as);

#endif
