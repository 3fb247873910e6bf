/* saved_hooks.h: saved-tensor hooks that keep what autograd saves as payloads. */
#ifndef GRADCKPT_SAVED_HOOKS_H
#define GRADCKPT_SAVED_HOOKS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec gck_saved_hooks_spec;

/* hooks: torch's innermost ones of this thread.  1 when they are ours and keep tensors lossily, with
 * *replay_discrete of their gck_plan; else 0. */
int gck_saved_hooks_are_lossy(PyObject *hooks, int *replay_discrete);

/* For Python: hooks_are_lossy(): are the innermost hooks of this thread ours, keeping tensors lossily? */
PyObject *gck_saved_hooks_are_lossy_py(PyObject *module, PyObject *unused);

/* saved_push(compress, formats): the hooks become the innermost of this thread. */
PyObject *gck_saved_hooks_push(PyObject *module, PyObject *args);

/* saved_pair(compress, formats): (pack, unpack), for any thread and whatever takes a pair. */
PyObject *gck_saved_hooks_pair(PyObject *module, PyObject *args);

/* saved_pop(failed): take the innermost hooks off; failed: an exception ended their block. */
PyObject *gck_saved_hooks_pop(PyObject *module, PyObject *failed);

/* saved_call(compress, formats, function, args, kwargs): push, call, pop. */
PyObject *gck_saved_hooks_call(PyObject *module, PyObject *args);

#endif
