/* recompute.h: the backward side. */
#ifndef GRADCKPT_RECOMPUTE_H
#define GRADCKPT_RECOMPUTE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Heap type Recompute: binds the hooks of a recompute. */
extern PyType_Spec gck_recompute_spec;

/* The unpack hook of the forward; frame: the Frame to which it is bound. */
PyObject *gck_unpack(PyObject *frame, PyObject *holder);

#endif
