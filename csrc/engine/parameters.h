/* parameters.h: the module behind a function, and its parameters. */
#ifndef GRADCKPT_PARAMETERS_H
#define GRADCKPT_PARAMETERS_H

#include "state.h"

/* Borrowed: the module whose code the function is: itself, of a bound method, of a partial.
 * NULL without an exception: it is another callable. */
PyObject *gck_module_behind(const gck_py *py, PyObject *function);

/* New reference: list of its parameters that require grad, each once, in the order of
 * Module.parameters(); empty for NULL. */
PyObject *gck_parameters_of(const gck_py *py, PyObject *module);

#endif
