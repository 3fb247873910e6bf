/* aliases.c: arguments of a compressed region that share memory. */
#include "aliases.h"

/* New reference: x's version, or None where there is none (inference tensors). */
static PyObject *version_of(const gck_py *py, PyObject *x)
{
    PyObject *version = PyObject_GetAttr(x, py->names._version);

    if (version == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        version = Py_NewRef(Py_None);
    }
    return version;
}

static int append(PyObject *rows, const gck_py *py, PyObject *x, PyObject *fed, int packed)
{
    PyObject *version = version_of(py, fed);
    PyObject *row = version != NULL ? PyTuple_Pack(4, x, fed, packed ? Py_True : Py_False, version) : NULL;
    const int status = row == NULL ? -1 : PyList_Append(rows, row);

    Py_XDECREF(version);
    Py_XDECREF(row);
    return status;
}

int gck_aliases_add(gck_aliases *a, const gck_py *py, PyObject *x, PyObject *fed, int packed)
{
    if (a->x == NULL && a->rows == NULL && fed == x) {     /* the usual region has no second one */
        a->x = Py_NewRef(x);
        a->fed = Py_NewRef(fed);
        a->packed = packed;
        return 0;
    }
    if (a->rows == NULL
        && ((a->rows = PyList_New(0)) == NULL || (a->x != NULL && append(a->rows, py, a->x, a->fed, a->packed) < 0))) {
        return -1;
    }
    return append(a->rows, py, x, fed, packed);
}

/* 1: written to since; 0; -1. */
static int is_changed(const gck_py *py, PyObject *row)
{
    PyObject *now = version_of(py, PyTuple_GetItem(row, 1));
    const int changed = now == NULL ? -1 : PyObject_RichCompareBool(now, PyTuple_GetItem(row, 3), Py_NE);

    Py_XDECREF(now);
    return changed;
}

int gck_aliases_check(gck_aliases *a, const gck_py *py)
{
    const Py_ssize_t n = a->rows != NULL ? PyList_Size(a->rows) : 0;
    int changed = 0;                             /* versions say more than asked: views have one in common */

    for (Py_ssize_t i = 0; i < n && changed == 0; i++) {
        changed = is_changed(py, PyList_GetItem(a->rows, i));
    }
    if (changed > 0) {
        PyObject *checked = PyObject_CallMethod(py->shim, "check_aliases", "O", a->rows);
        changed = checked == NULL ? -1 : 0;
        Py_XDECREF(checked);
    }
    return changed;
}

void gck_aliases_clear(gck_aliases *a)
{
    Py_CLEAR(a->x);
    Py_CLEAR(a->fed);
    Py_CLEAR(a->rows);
}
