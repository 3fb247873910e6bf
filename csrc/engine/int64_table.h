/* int64_table.h: tables of numbers from Python. */
#ifndef GRADCKPT_INT64_TABLE_H
#define GRADCKPT_INT64_TABLE_H

#include <Python.h>
#include <stddef.h>
#include <stdint.h>

/* A copy of the rows (malloc), each of so many bytes, of an array('q') or bytes, which may lie at any address; and *n,
 * their number.  columns: what a row has, for the message.  NULL with an exception. */
void *gck_int64_rows(PyObject *object, const char *name, size_t row, const char *columns, int64_t *n);

#endif
