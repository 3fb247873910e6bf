/* slices.c: arguments of a region that lie in one memory. */
#include "engine/payload/slices.h"

#include "torch/calls.h"
#include "torch/input.h"
#include "torch/tensor.h"

#include <stdlib.h>

static int64_t reach_of(const gck_payload *p) { return gck_reach(p->ndim, p->sizes, p->sizes + p->ndim); }

static int64_t itemsize_of(const gck_sliced *s) { return (int64_t)gck_itemsize(s->payload->dtype); }

static uintptr_t end_of(const gck_sliced *s)
{
    return s->begin + (uintptr_t)(reach_of(s->payload) * itemsize_of(s));
}

static int compare(const void *left, const void *right)
{
    const gck_sliced *a = left, *b = right;

    return a->payload->device != b->payload->device ? (a->payload->device > b->payload->device ? 1 : -1)
         : a->payload->dtype != b->payload->dtype   ? (a->payload->dtype > b->payload->dtype ? 1 : -1)
         : (a->begin > b->begin) - (a->begin < b->begin);
}

/* 1 when b lies in the memory of a, which ends there. */
static int meets(const gck_sliced *a, uintptr_t end, const gck_sliced *b)
{
    return a->begin != 0 && b->begin < end && a->payload->dtype == b->payload->dtype
        && a->payload->device == b->payload->device && (b->begin - a->begin) % (uintptr_t)itemsize_of(a) == 0;
}

/* Read where each lies, at one moment at which all are alive: no Python runs.  0 or -1. */
static int find_memory(gck_py *py, PyObject *rows, gck_sliced *of, Py_ssize_t n)
{
    gck_tensor view;
    Py_ssize_t i = 0;

    for (Py_ssize_t r = 0; r < PyList_Size(rows); r++) {
        PyObject *row = PyList_GetItem(rows, r), *payload = PyTuple_GetItem(row, 2);
        while (payload != Py_None && i < n && (PyObject *)of[i].payload != payload) {
            i++;                                 /* an argument for the second time, which has no row */
        }
        if (payload != Py_None && i < n) {
            const int reason = gck_view_of(py, PyTuple_GetItem(row, 0), &view);
            if (reason < 0) {
                return -1;
            }
            of[i].begin = reason == GCK_COMPRESS && of[i].payload->numel > 0 ? (uintptr_t)view.data : 0;
            i++;
        }
    }
    return 0;
}

int gck_slices_find(gck_py *py, PyObject *rows, gck_sliced *of, Py_ssize_t n)
{
    int group = 0;

    if (find_memory(py, rows, of, n) < 0) {
        return -1;
    }
    qsort(of, (size_t)n, sizeof *of, compare);
    for (Py_ssize_t i = 0, next; i < n; i = next) {
        const int shift = of[i].payload->shift;
        uintptr_t end = end_of(&of[i]);
        for (next = i + 1; next < n && meets(&of[i], end, &of[next]); next++) {
            end = end_of(&of[next]) > end ? end_of(&of[next]) : end;
        }
        group += next > i + 1;
        for (Py_ssize_t j = i; next > i + 1 && j < next; j++) {
            *of[j].slice = (gck_slice){group, shift + (int64_t)(of[j].begin - of[i].begin) / itemsize_of(&of[i]),
                                       shift + (int64_t)(end - of[i].begin) / itemsize_of(&of[i])};
        }
    }
    return 0;
}

/* New reference: the buffer of a group. */
static PyObject *buffer_of(const gck_slice *slice, const gck_payload *payload, gck_batch *batch)
{
    GCK_SCOPED PyObject *group = PyLong_FromLong(slice->group);
    GCK_SCOPED PyObject *buffer = NULL;

    if (group == NULL || (batch->made == NULL && (batch->made = PyDict_New()) == NULL)) {
        return NULL;
    }
    buffer = Py_XNewRef(PyDict_GetItemWithError(batch->made, group));
    if (buffer != NULL || PyErr_Occurred()) {
        return gck_give(&buffer);
    }
    buffer = gck_empty(&payload->state->py, 1, &slice->span, NULL, payload->dtype, payload->device);
    return buffer == NULL || PyDict_SetItem(batch->made, group, buffer) < 0 ? NULL : gck_give(&buffer);
}

PyObject *gck_slice_memory(const gck_slice *slice, const gck_payload *payload, gck_batch *batch)
{
    GCK_SCOPED PyObject *buffer = slice->group != 0 ? buffer_of(slice, payload, batch) : NULL;
    return buffer != NULL ? gck_payload_within(payload, buffer, slice->offset) : NULL;
}
