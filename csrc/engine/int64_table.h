/* int64_table.h: tables of numbers from Python. */
#ifndef GRADCKPT_INT64_TABLE_H
#define GRADCKPT_INT64_TABLE_H

#include <Python.h>

/* View an array('q') or bytes, which may lie at any address; PyBuffer_Release() it.  0 or -1 with an
 * exception. */
int gck_int64_table(PyObject *object, const char *name, Py_buffer *view);

#endif
