/* memory_use.h: the model of torch's allocator for CUDA, for Python. */
#ifndef GRADCKPT_MEMORY_USE_H
#define GRADCKPT_MEMORY_USE_H

#include "engine/state.h"

/* _C.memory_use(): a dict, which gradckpt/_C.pyi describes.  The trace is copied, and the GIL is
 * released while it is played. */
PyObject *gck_memory_use_py(PyObject *module, PyObject *object);

#endif
