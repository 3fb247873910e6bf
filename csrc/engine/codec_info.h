/* codec_info.h: codecs and instruction sets, for Python. */
#ifndef GRADCKPT_CODEC_INFO_H
#define GRADCKPT_CODEC_INFO_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Each as gradckpt/_C.pyi says. */
PyObject *gck_codecs_py(PyObject *module, PyObject *unused);
PyObject *gck_codec_info_py(PyObject *module, PyObject *name);
PyObject *gck_isa_py(PyObject *module, PyObject *unused);
PyObject *gck_force_isa_py(PyObject *module, PyObject *name);

#endif
