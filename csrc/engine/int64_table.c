/* int64_table.c: what a buffer of 64-bit integers is. */
#include "engine/int64_table.h"

#include "torch/calls.h"

#include <stdlib.h>
#include <string.h>

static int is_int64(const Py_buffer *view)
{
    const char *format = view->format != NULL ? view->format : "B";

    format += format[0] == '@' || format[0] == '=';
    return view->itemsize == 1 || (view->itemsize == 8 && (strcmp(format, "q") == 0 || strcmp(format, "l") == 0));
}

void *gck_int64_rows(PyObject *object, const char *name, size_t row, const char *columns, int64_t *n)
{
    GCK_CLEARED_BY(PyBuffer_Release) Py_buffer view = {.obj = NULL};
    void *rows;

    if (PyObject_GetBuffer(object, &view, PyBUF_ND | PyBUF_FORMAT) < 0) {
        return NULL;
    }
    if (!is_int64(&view)) {
        return PyErr_Format(PyExc_ValueError, "gradckpt: %s is not of 64-bit integers; pass an array('q') or bytes",
                            name);
    }
    *n = view.len / (Py_ssize_t)row;
    if (view.len % (Py_ssize_t)row != 0) {
        return PyErr_Format(PyExc_ValueError, "gradckpt: %s has %zd bytes; pass %zu for each: %s", name, view.len, row,
                            columns);
    }
    rows = malloc((size_t)view.len + 1);
    return rows != NULL ? memcpy(rows, view.buf, (size_t)view.len) : PyErr_NoMemory();
}
