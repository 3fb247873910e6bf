/* saved_pins.h: frees long chains of nodes piece by piece.
 *
 * Torch keeps the Python object that was once made of a node (since 2.13), and then frees nodes behind one
 * another by recursion, 200 bytes of stack each; without objects it frees them in a loop.  compress_saved()
 * has to look at nodes.  So of those that it looks at some are held here, not too far from each other on any
 * path: there a recursion ends.  When what used such a node is freed, it is let go. */
#ifndef GRADCKPT_SAVED_PINS_H
#define GRADCKPT_SAVED_PINS_H

#include "engine/state.h"

/* At most so many nodes with objects lie between two that are held: 100 KiB of stack.  The first nodes that are
 * looked at while tensors are saved are not counted. */
enum { GCK_PIN_EVERY = 500, GCK_PIN_FROM = 250 };

/* A node has been looked at, those behind it before.  0 or -1. */
int gck_pins_looked(gck_state *state, PyObject *node);

void gck_pins_clear(gck_state *state);

#endif
