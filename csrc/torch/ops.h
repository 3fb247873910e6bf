/* ops.h: torch.ops.gradckpt.encode and .decode. */
#ifndef GRADCKPT_OPS_H
#define GRADCKPT_OPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Register both for CPU and CUDA, once per process.  NULL when good, else what torch rejected,
 * which every later call returns too: borrowed, valid for ever.  Needs gck_torch. */
const char *gck_ops_register(void);

/* Python's add_device(): a kind of device that is torch's PrivateUse1, by a capsule "gck_device_kind".  None. */
PyObject *gck_add_device(PyObject *module, PyObject *capsule);

#endif
