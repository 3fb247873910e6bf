/* memory_use.c: a trace from Python for the model of torch's allocator, and what it needs. */
#include "engine/memory_use.h"

#include "engine/int64_table.h"
#include "planner/caching_allocator.h"

#include <stdlib.h>

static PyObject *dict_of(const gck_memory_use *use, int has_needed, int64_t needed)
{
    PyObject *found = has_needed ? PyLong_FromLongLong(needed) : Py_NewRef(Py_None);

    return Py_BuildValue("{sO sL sL sL sN}", "completed", use->completed ? Py_True : Py_False, "requested",
                         (long long)use->requested, "allocated", (long long)use->allocated, "reserved",
                         (long long)use->reserved, "needed", found);
}

PyObject *gck_memory_use_py(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static const char *const names[] = {"changes", "expandable", "capacity", NULL};
    gck_memory_trace trace = {.n = 0};
    gck_memory_change *changes;
    gck_memory_use use;
    PyObject *object, *capacity = Py_None;
    int64_t limit = -1, needed = 0;
    int status;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|pO:memory_use", (char **)names, &object, &trace.expandable,
                                     &capacity)
        || (capacity != Py_None && (limit = PyLong_AsLongLong(capacity)) == -1 && PyErr_Occurred())
        || (changes = gck_int64_rows(object, "changes", sizeof *changes, "bytes, name, stream", &trace.n)) == NULL) {
        return NULL;
    }
    trace.changes = changes;
    Py_BEGIN_ALLOW_THREADS
    status = gck_memory_trace_check(&trace);
    if (status == GCK_OK) {
        status = capacity != Py_None ? gck_memory_trace_play(&trace, limit, &use)
                                     : gck_memory_trace_needed(&trace, &use, &needed);
    }
    Py_END_ALLOW_THREADS
    free(changes);
    if (status == GCK_E_MEMORY) {
        return PyErr_NoMemory();
    }
    return status == GCK_OK ? dict_of(&use, capacity == Py_None, needed)
         : PyErr_Format(PyExc_ValueError, "gradckpt: a change is out of range, or its name is used twice; pass (bytes, "
                          "name, stream), 0 bytes to release");
}
