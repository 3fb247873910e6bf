/* generators.h: random number generators beside the CPU's default one (rng.h): the states of those of the devices
 * that a region uses, and what one operator draws, so that its replay can leave the generator in the same state. */
#ifndef GRADCKPT_GENERATORS_H
#define GRADCKPT_GENERATORS_H

#include "torch/objects.h"

/* *states: new reference, or NULL when the arguments lie on the CPU alone; only the functions below read it.  args: a
 * tuple, kwargs: a dict or NULL.  exact: as torch searches, one device type among the positional arguments, with its
 * warning.  0, or -1 with an exception. */
int gck_device_rng_capture(gck_py *py, PyObject *args, PyObject *kwargs, int preserve, int exact, PyObject **states);

/* Set the states; *previous: new reference, those before, also of a part after an exception.  0 or -1. */
int gck_device_rng_swap(const gck_py *py, PyObject *states, PyObject **previous);

/* Refuse to give these states to a graph that is captured now, where a recompute could not draw the forward's numbers.
 * states: or NULL.  0, or -1 with an exception. */
int gck_device_rng_refuse_captured(const gck_py *py, PyObject *states);

/* Where this torch knows an accelerator: 1 when its state exists already; 0; -1. */
int gck_accelerator_initialized(const gck_py *py);

/* ---- what one operator draws ---- */

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
