/* int64_table.c: what a buffer of 64-bit integers is. */
#include "engine/int64_table.h"

#include <stdlib.h>
#include <string.h>

static int is_int64(const Py_buffer *view)
{
    const char *format = view->format != NULL ? view->format : "B";

    format += format[0] == '@' || format[0] == '=';
    return view->itemsize == 1 || (view->itemsize == 8 && (strcmp(format, "q") == 0 || strcmp(format, "l") == 0));
}

int gck_int64_table(PyObject *object, const char *name, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT) < 0) {
        return -1;
    }
    if (!is_int64(view)) {
        PyErr_Format(PyExc_ValueError, "gradckpt: %s is not of 64-bit integers; pass an array('q') or bytes", name);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

void *gck_int64_rows(PyObject *object, const char *name, size_t row, const char *columns, int64_t *n)
{
    void *rows = NULL;
    Py_buffer view;

    if (gck_int64_table(object, name, &view) < 0) {
        return NULL;
    }
    *n = view.len / (Py_ssize_t)row;
    if (view.len % (Py_ssize_t)row != 0) {
        PyErr_Format(PyExc_ValueError, "gradckpt: %s has %zd bytes; pass %zu for each: %s", name, view.len, row,
                     columns);
    } else if ((rows = malloc((size_t)view.len + 1)) == NULL) {
        PyErr_NoMemory();
    } else {
        memcpy(rows, view.buf, (size_t)view.len);
    }
    PyBuffer_Release(&view);
    return rows;
}
