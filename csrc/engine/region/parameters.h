/* parameters.h: the module behind a function, and its parameters. */
#ifndef GRADCKPT_PARAMETERS_H
#define GRADCKPT_PARAMETERS_H

#include "torch/objects.h"

/* *module: new reference to the module whose code the function is: the function itself, or the
 * module of a bound method or of a partial; NULL: another callable.  0 or -1. */
int gck_module_behind(const gck_py *py, PyObject *function, PyObject **module);

/* New reference: list of its parameters that require grad, each once, in the order of
 * Module.parameters(). */
PyObject *gck_parameters_of(const gck_py *py, PyObject *module);

/* New reference: list of these modules and those inside them, each once. */
PyObject *gck_modules_of(const gck_py *py, PyObject *roots);

/* Facts about objects, in a dict id -> weak reference, which tells a dead object from a new one at
 * its address. */
int gck_known(PyObject *known, PyObject *x);                                     /* 1 or 0 */
/* Remember the object.  Objects without weak references are skipped. */
void gck_remember(PyObject *known, PyObject *x);

/* For gradckpt._engine.parameter_hooks. */
PyObject *gck_guard_hooks(PyObject *module, PyObject *args);

#endif
