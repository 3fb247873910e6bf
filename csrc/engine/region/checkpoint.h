/* checkpoint.h: the forward side. */
#ifndef GRADCKPT_CHECKPOINT_H
#define GRADCKPT_CHECKPOINT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* gradckpt.checkpoint(function, *args, ...), and torch's exact one, gradckpt.compat.checkpoint:
 * METH_FASTCALL | METH_KEYWORDS. */
PyObject *gck_checkpoint(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *gck_compat_checkpoint(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

extern const char gck_checkpoint_doc[], gck_compat_checkpoint_doc[];

#endif
