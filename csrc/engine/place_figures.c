/* place_figures.c: sums over a store and the offloaders of its devices; and what places have counted that ended. */
#include "engine/place_figures.h"

#include "offload/offloader.h"

#include <unistd.h>

typedef struct {
    gck_byte_store_figures store;
    gck_offloader_figures  offloaders;
    long long              kept, small;
} counts;

/* Counters alone; with the GIL. */
static counts of_ended;

static counts read_counts(gck_place_object *self, int restart)
{
    const int mine = self->process == getpid();
    counts found = {.offloaders = self->ended, .kept = mine ? self->kept : 0, .small = mine ? self->small : 0};

    gck_byte_store_read_figures(self->store, restart, &found.store);
    for (gck_place_device *of = mine ? self->devices : NULL; of != NULL; of = of->next) {
        gck_offloader_figures f;
        gck_offloader_read_figures(of->offloader, restart, &f);
        gck_offloader_add_counts(&found.offloaders, &f);
        found.offloaders.ring += f.ring;
        found.offloaders.ring_used += f.ring_used;
        found.offloaders.ring_peak += f.ring_peak;
        found.offloaders.ring_lost += f.ring_lost;
    }
    if (restart) {
        self->ended = (gck_offloader_figures){.ring = 0};
        self->kept = self->small = 0;
    }
    return found;
}

static int set(PyObject *into, const char *name, long long value)
{
    PyObject *number = PyLong_FromLongLong(value);
    const int status = number == NULL ? -1 : PyDict_SetItemString(into, name, number);

    Py_XDECREF(number);
    return status;
}

#define FIGURE(of, name) || set(into, #name, of.name) < 0
static PyObject *dict_of(counts c)
{
    PyObject *into = PyDict_New();
    const int failed = into == NULL FIGURE(c, kept) FIGURE(c, small) FIGURE(c.store, memory)
        FIGURE(c.store, memory_used) FIGURE(c.store, memory_peak) FIGURE(c.store, memory_taken) FIGURE(c.store, pinned)
        FIGURE(c.store, pin_calls) FIGURE(c.store, file_used) FIGURE(c.store, file_peak) FIGURE(c.store, written)
        FIGURE(c.store, read) FIGURE(c.store, write_ns) FIGURE(c.store, read_ns) FIGURE(c.store, puts)
        FIGURE(c.store, gets) FIGURE(c.store, from_memory) FIGURE(c.store, waits_put) FIGURE(c.store, waits_get)
        FIGURE(c.offloaders, ring) FIGURE(c.offloaders, ring_used) FIGURE(c.offloaders, ring_peak)
        FIGURE(c.offloaders, ring_lost) FIGURE(c.offloaders, bytes_out) FIGURE(c.offloaders, bytes_in)
        FIGURE(c.offloaders, copies_out) FIGURE(c.offloaders, copies_in) FIGURE(c.offloaders, read_in_ring)
        FIGURE(c.offloaders, prefetched) FIGURE(c.offloaders, misses_out) FIGURE(c.offloaders, misses_in);

    if (failed) {
        Py_CLEAR(into);
    }
    return into;
}
#undef FIGURE

static int restarts(PyObject *args) { return PyTuple_Size(args) > 0 && PyObject_IsTrue(PyTuple_GetItem(args, 0)); }

PyObject *gck_place_figures(PyObject *op, PyObject *args)
{
    return dict_of(read_counts((gck_place_object *)op, restarts(args)));
}

void gck_place_figures_stay(gck_place_object *place)
{
    const counts last = read_counts(place, 0);
    gck_byte_store_figures *sum = &of_ended.store;

    sum->pin_calls += last.store.pin_calls;
    sum->written += last.store.written;
    sum->read += last.store.read;
    sum->write_ns += last.store.write_ns;
    sum->read_ns += last.store.read_ns;
    sum->puts += last.store.puts;
    sum->gets += last.store.gets;
    sum->from_memory += last.store.from_memory;
    sum->waits_put += last.store.waits_put;
    sum->waits_get += last.store.waits_get;
    gck_offloader_add_counts(&of_ended.offloaders, &last.offloaders);
    of_ended.kept += last.kept;
    of_ended.small += last.small;
}

PyObject *gck_figures_of_ended_places(PyObject *module, PyObject *args)
{
    PyObject *found = dict_of(of_ended);

    (void)module;
    if (restarts(args)) {
        of_ended = (counts){.kept = 0};
    }
    return found;
}
