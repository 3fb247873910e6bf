/* memory_use.c: a trace from Python for the model of torch's allocator, and what it needs. */
#include "engine/memory_use.h"

#include "engine/int64_table.h"
#include "planner/caching_allocator.h"

#include <stdlib.h>
#include <string.h>

/* The changes of a table, malloc.  NULL with an exception. */
static gck_memory_change *copy_changes(PyObject *object, int64_t *n)
{
    gck_memory_change *changes = NULL;
    Py_buffer view;

    if (gck_int64_table(object, "changes", &view) < 0) {
        return NULL;
    }
    if (view.len % (Py_ssize_t)sizeof *changes != 0) {
        PyErr_Format(PyExc_ValueError, "gradckpt: changes has %zd bytes; pass 16 for each: bytes, name", view.len);
    } else if ((changes = malloc((size_t)view.len + 1)) == NULL) {
        PyErr_NoMemory();
    } else {
        memcpy(changes, view.buf, (size_t)view.len);
        *n = view.len / (Py_ssize_t)sizeof *changes;
    }
    PyBuffer_Release(&view);
    return changes;
}

PyObject *gck_memory_use_py(PyObject *module, PyObject *object)
{
    gck_memory_trace trace = {.n = 0};
    gck_memory_change *changes = copy_changes(object, &trace.n);
    gck_memory_use use;
    int status;

    (void)module;
    if (changes == NULL) {
        return NULL;
    }
    trace.changes = changes;
    Py_BEGIN_ALLOW_THREADS
    status = gck_memory_trace_check(&trace);
    status = status == GCK_OK ? gck_memory_trace_needed(&trace, &use) : status;
    Py_END_ALLOW_THREADS
    free(changes);
    if (status == GCK_OK) {
        return Py_BuildValue("{sL sL sL sL}", "requested", (long long)use.requested, "allocated",
                             (long long)use.allocated, "reserved", (long long)use.reserved, "needed",
                             (long long)use.needed);
    }
    if (status == GCK_E_MEMORY) {
        return PyErr_NoMemory();
    }
    PyErr_SetString(PyExc_ValueError, "gradckpt: a change is out of range, or its name is used twice; pass (bytes, "
                                      "name), 0 bytes to release");
    return NULL;
}
