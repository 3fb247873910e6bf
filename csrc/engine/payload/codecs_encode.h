/* codecs_encode.h: gradckpt.codecs.encode(). */
#ifndef GRADCKPT_ENCODE_H
#define GRADCKPT_ENCODE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* gradckpt.codecs.encode(x, codec, (seed, step, tensor) or None). */
PyObject *gck_encode_py(PyObject *module, PyObject *args);

#endif
