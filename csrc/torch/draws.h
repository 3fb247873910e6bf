/* draws.h: what one operator draws from a random generator, so that its replay can leave the generator there. */
#ifndef GRADCKPT_DRAWS_H
#define GRADCKPT_DRAWS_H

#include "tensor.h"

/* 1 when the operator says by its tag that it draws; 0; -1. */
int gck_op_draws(const gck_py *py, PyObject *op);

/* Around a call that runs: the generator, NULL for the CPU's default one, and its state before.  Owned. */
typedef struct {
    PyObject *generator, *before;
} gck_draw;

/* Read the generator that a call with these arguments draws from.  0, or -1 and *draw is empty. */
int gck_draw_begin(gck_py *py, PyObject *args, PyObject *kwargs, gck_draw *draw);

/* The call is over.  New reference: what it drew, for gck_draw_repeat; None: nothing.  *draw is empty afterwards. */
PyObject *gck_draw_end(gck_py *py, gck_draw *draw);
void gck_draw_clear(gck_draw *draw);

/* The generator of a call with these arguments, if it stands where the other call found it, is put where that call
 * left it.  Any other was not put back for the recompute and stays.  0 or -1. */
int gck_draw_repeat(gck_py *py, PyObject *args, PyObject *kwargs, PyObject *drawn);

#endif
