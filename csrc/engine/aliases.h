/* aliases.h: arguments of a compressed region that share memory.
 *
 * Each argument is restored by itself, so a write that reached two of them in the forward
 * reaches one in the recompute, and the gradients would be wrong without a word.  Torch
 * refuses any write to an argument; here one is refused that another argument sees. */
#ifndef GRADCKPT_ALIASES_H
#define GRADCKPT_ALIASES_H

#include "../torch/input.h"

typedef struct {
    PyObject *rows;          /* owned list of (the tensor, what the function gets for it, its payload, version of the
                                second); payload None: by reference; NULL: there is none */
} gck_aliases;

/* in->x is an argument, `fed` what the function gets for it, and `payload` how it is kept; NULL: by
 * reference.  0 or -1. */
int gck_aliases_add(gck_aliases *aliases, gck_py *py, gck_input *in, PyObject *fed, PyObject *payload);

/* New reference: the payload that x, as it is, has got as an argument before, and *fed; or NULL. */
PyObject *gck_aliases_find(const gck_aliases *aliases, const gck_input *in, PyObject **fed);

/* After the function has run: what it wrote to a stand-in of an argument goes to the argument.  0, or -1 with an
 * exception, also when it wrote to memory that a compressed argument shares with another. */
int gck_aliases_check(gck_aliases *aliases, const gck_py *py);

void gck_aliases_clear(gck_aliases *aliases);

#endif
