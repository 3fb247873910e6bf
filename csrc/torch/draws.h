/* draws.h: the numbers that one operator draws from a generator, so that its replay can leave the
 * generator in the same state. */
#ifndef GRADCKPT_DRAWS_H
#define GRADCKPT_DRAWS_H

#include "torch/objects.h"

/* 1 when the operator's tag says that it draws, or nothing says what it does: tags of users' operators tell nothing,
 * and higher order operators have none; 0; -1. */
int gck_op_draws(const gck_py *py, PyObject *op);

/* The state around a call: the generator, NULL for the CPU's default one, and its state before.
 * Owned. */
typedef struct {
    PyObject *generator, *before;
} gck_draw;

/* Read the generator that a call with these arguments draws from.  0, or -1 and *draw is empty. */
int gck_draw_begin(gck_py *py, PyObject *args, PyObject *kwargs, gck_draw *draw);

/* The call is over.  New reference: what it drew, for gck_draw_repeat; None: nothing.  *draw is
 * empty afterwards. */
PyObject *gck_draw_end(gck_py *py, gck_draw *draw);
void gck_draw_clear(gck_draw *draw);

/* Move the generator of a call with these arguments to where the other call left it, if it is where
 * that call found it.  Any other generator was not restored for the recompute and stays.
 * 0 or -1. */
int gck_draw_repeat(gck_py *py, PyObject *args, PyObject *kwargs, PyObject *drawn);

#endif
