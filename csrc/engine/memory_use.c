/* memory_use.c: a trace from Python for the model of torch's allocator, and what it needs. */
#include "engine/memory_use.h"

#include "engine/int64_table.h"
#include "planner/caching_allocator.h"

#include <stdlib.h>

PyObject *gck_memory_use_py(PyObject *Py_UNUSED(module), PyObject *object)
{
    gck_memory_trace trace = {.n = 0};
    gck_memory_change *changes = gck_int64_rows(object, "changes", sizeof *changes, "bytes, name", &trace.n);
    gck_memory_use use;
    int status;

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
    return PyErr_Format(PyExc_ValueError, "gradckpt: a change is out of range, or its name is used twice; pass (bytes, "
                                          "name), 0 bytes to release");
}
