/* paper.h: a step on paper (gradckpt/_planning/paper.py), in which most tensors have an address and
 * no memory. */
#ifndef GRADCKPT_PAPER_H
#define GRADCKPT_PAPER_H

#include <Python.h>
#include <stdint.h>

/* Whether this thread runs one. */
int gck_on_paper(void);

/* 0 when this address is of a tensor without memory, which must not be touched. */
int gck_has_values(const void *memory);

/* Whether what lies on this device (-1: the CPU) is to be treated as a device's: it is one's, or this
 * thread runs a step on paper for one. */
int gck_counts_as_device(int device);

/* Where bytes are that have a place (engine/place.h) and no values: an address that must not be touched. */
void *gck_paper_memory(void);

/* So many bytes have a place. */
void gck_paper_placed(int64_t nbytes);

/* _C.placed_on_paper(): (bytes that got a place in steps of this thread, the most of one since the last call). */
PyObject *gck_placed_on_paper_py(PyObject *module, PyObject *unused);

/* _C.set_on_paper(first, end, is_device): those addresses; 0, 0: none.  _C.on_paper(). */
PyObject *gck_set_on_paper_py(PyObject *module, PyObject *args);
PyObject *gck_on_paper_py(PyObject *module, PyObject *unused);

#endif
