/* paper.h: a step on paper (gradckpt/_planning/paper.py), in which most tensors have an address and
 * no memory. */
#ifndef GRADCKPT_PAPER_H
#define GRADCKPT_PAPER_H

#include <Python.h>

/* Whether this thread runs one. */
int gck_on_paper(void);

/* 0 when this address is of a tensor without memory, which must not be touched. */
int gck_has_values(const void *memory);

/* _C.set_on_paper(first, end): those addresses; 0, 0: none.  _C.on_paper(). */
PyObject *gck_set_on_paper_py(PyObject *module, PyObject *args);
PyObject *gck_on_paper_py(PyObject *module, PyObject *unused);

#endif
