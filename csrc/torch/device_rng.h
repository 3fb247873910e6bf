/* device_rng.h: the states of the generators of the devices that a region uses. */
#ifndef GRADCKPT_DEVICE_RNG_H
#define GRADCKPT_DEVICE_RNG_H

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

#endif
