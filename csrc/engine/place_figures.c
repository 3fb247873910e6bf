/* place_figures.c: sums over a store and the offloaders of its devices. */
#include "engine/place_figures.h"

#include "offload/offloader.h"

#include <unistd.h>

/* Add the figures of one device.  0 or -1. */
static int add_figures(PyObject *into, const char *name, long long value)
{
    PyObject *before = PyDict_GetItemString(into, name);       /* borrowed */
    PyObject *sum = PyLong_FromLongLong(value + (before != NULL ? PyLong_AsLongLong(before) : 0));
    const int status = sum == NULL ? -1 : PyDict_SetItemString(into, name, sum);

    Py_XDECREF(sum);
    return status;
}

#define FIGURE(name) || add_figures(into, #name, f.name) < 0
static int add_offloaders(PyObject *into, gck_offloader_figures f)
{
    return 0 FIGURE(ring) FIGURE(ring_used) FIGURE(ring_peak) FIGURE(ring_lost) FIGURE(bytes_out) FIGURE(bytes_in)
        FIGURE(copies_out) FIGURE(copies_in) FIGURE(read_in_ring) FIGURE(prefetched) FIGURE(misses_out)
        FIGURE(misses_in) ? -1 : 0;
}

PyObject *gck_place_figures(PyObject *op, PyObject *args)
{
    gck_place_object *self = (gck_place_object *)op;
    const int restart = PyTuple_Size(args) > 0 && PyObject_IsTrue(PyTuple_GetItem(args, 0));
    PyObject *into = PyDict_New();
    gck_byte_store_figures f;
    int status;

    gck_byte_store_read_figures(self->store, restart, &f);
    status = into == NULL || add_figures(into, "kept", self->process == getpid() ? self->kept : 0) < 0
        || add_figures(into, "small", self->process == getpid() ? self->small : 0) < 0
        FIGURE(memory) FIGURE(memory_used) FIGURE(memory_peak) FIGURE(memory_taken) FIGURE(pinned) FIGURE(pin_calls)
        FIGURE(file_used) FIGURE(file_peak) FIGURE(written) FIGURE(read) FIGURE(write_ns) FIGURE(read_ns) FIGURE(puts)
        FIGURE(gets) FIGURE(from_memory) FIGURE(waits_put) FIGURE(waits_get)
        || add_offloaders(into, self->ended) < 0 ? -1 : 0;
    self->ended = restart ? (gck_offloader_figures){.ring = 0} : self->ended;
    const gck_place_device *of = self->process == getpid() ? self->devices : NULL;
    for (; of != NULL && status == 0; of = of->next) {
        gck_offloader_figures of_device;
        gck_offloader_read_figures(of->offloader, restart, &of_device);
        status = add_offloaders(into, of_device);
    }
    self->kept = restart ? 0 : self->kept;
    self->small = restart ? 0 : self->small;
    Py_XDECREF(status < 0 ? into : NULL);
    return status < 0 ? NULL : into;
}
#undef FIGURE
