/* saved.h: saved-tensor hooks that keep what autograd saves as payloads. */
#ifndef GRADCKPT_SAVED_H
#define GRADCKPT_SAVED_H

#include "state.h"

extern PyType_Spec gck_saver_spec;     /* the pair of hooks, with what was asked for */
extern PyType_Spec gck_saved_spec;     /* one saved tensor                           */

/* saved_push(compress): the hooks become the innermost of this thread. */
PyObject *gck_saved_push(PyObject *module, PyObject *compress);

/* saved_pop(): the innermost ones come off. */
PyObject *gck_saved_pop(PyObject *module, PyObject *unused);

/* saved_call(compress, function, args, kwargs): push, call, pop. */
PyObject *gck_saved_call(PyObject *module, PyObject *args);

#endif
