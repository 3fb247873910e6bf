/* parameters.h: the module behind a function, and its parameters. */
#ifndef GRADCKPT_PARAMETERS_H
#define GRADCKPT_PARAMETERS_H

#include "state.h"

/* *module: new reference to the module whose code the function is: itself, of a bound method, of a
 * partial; NULL: it is another callable.  0 or -1. */
int gck_module_behind(const gck_py *py, PyObject *function, PyObject **module);

/* New reference: list of its parameters that require grad, each once, in the order of
 * Module.parameters(). */
PyObject *gck_parameters_of(const gck_py *py, PyObject *module);

/* Facts about modules that hold until one gets another child (gck_forget_modules): in a
 * dict id -> weak reference, which tells a dead module from a new one at its address. */
int gck_module_known(PyObject *known, PyObject *function);                       /* 1 or 0 */
/* Does nothing for what is no module.  0, or -1 with an exception. */
int gck_module_remember(const gck_state *state, PyObject *known, PyObject *function);

/* For gradckpt._hooks. */
PyObject *gck_guard_hooks(PyObject *module, PyObject *args);

#endif
