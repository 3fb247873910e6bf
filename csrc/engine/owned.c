/* owned.c: visits and clears what objects own. */
#include "engine/owned.h"

#include "torch/calls.h"

#include <stdlib.h>
#include <string.h>

static PyObject *reference_at(const void *of, size_t offset)
{
    PyObject *x;

    memcpy(&x, (const char *)of + offset, sizeof x);         /* fields of the engine's own types are among them */
    return x;
}

int gck_owned_visit(const void *of, const gck_owned *owned, visitproc visit, void *arg)
{
    for (; *owned != 0; owned++) {
        Py_VISIT(reference_at(of, *owned));
    }
    return 0;
}

int gck_object_visit(PyObject *op, const gck_owned *owned, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    return gck_owned_visit(op, owned, visit, arg);
}

int gck_owned_clear(void *of, const gck_owned *owned)
{
    for (; *owned != 0; owned++) {
        PyObject *old = reference_at(of, *owned), *const none = NULL;
        memcpy((char *)of + *owned, &none, sizeof none);
        Py_XDECREF(old);
    }
    return 0;
}

int gck_make_room(void *array, Py_ssize_t n, Py_ssize_t *room, size_t size)
{
    /* Few steps, and a small first block: malloc tidies up before it gives one of 1,024 bytes and more. */
    const Py_ssize_t more = *room == 0 ? 4 : (*room < 64 ? 4 : 2) * *room;
    void *items;

    if (n < *room) {
        return 0;
    }
    memcpy(&items, array, sizeof items);
    if ((items = realloc(items, (size_t)more * size)) == NULL) {
        return gck_done(PyErr_NoMemory());
    }
    memcpy(array, &items, sizeof items);
    *room = more;
    return 0;
}

void gck_object_free(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}
