/* simulated.h: a simulated step (gradckpt/_planning/simulation.py), in which most tensors have an address and
 * no memory. */
#ifndef GRADCKPT_SIMULATED_H
#define GRADCKPT_SIMULATED_H

#include <Python.h>
#include <stdint.h>

/* Whether this thread runs one. */
int gck_is_simulated(void);

/* 0 when this address is of a tensor without memory, which must not be touched. */
int gck_has_values(const void *memory);

/* Whether what lies on this device (-1: the CPU) is to be treated as a device's: it is one's, or this
 * thread runs a simulated step for one. */
int gck_counts_as_device(int device);

/* Where bytes are that have a place (engine/place.h) and no values: an address that must not be touched. */
void *gck_simulated_memory(void);

/* So many bytes have a place. */
void gck_count_simulated_placed(int64_t nbytes);

/* _C.simulated_placed(): (bytes that got a place in steps of this thread, the most of one since the last call). */
PyObject *gck_simulated_placed_py(PyObject *module, PyObject *unused);

/* _C.set_simulated(first, end, is_device): those addresses; 0, 0: none.  _C.is_simulated(). */
PyObject *gck_set_simulated_py(PyObject *module, PyObject *args);
PyObject *gck_is_simulated_py(PyObject *module, PyObject *unused);

#endif
