/* place_figures.c: sums over a store and the offloaders of its devices; and what places have counted that ended. */
#include "engine/place_figures.h"

#include "offload/offloader.h"
#include "torch/calls.h"

#include <unistd.h>

typedef struct {
    gck_byte_store_figures store;
    gck_offloader_figures  offloaders;
    long long              kept, small;
} counts;

/* What a store counts; the rest of its figures is what it has now. */
#define STORE_COUNTS(COUNTED)                                                                                   \
    COUNTED(pin_calls) COUNTED(written) COUNTED(read) COUNTED(write_ns) COUNTED(read_ns) COUNTED(puts)          \
    COUNTED(gets) COUNTED(from_memory) COUNTED(waits_put) COUNTED(waits_get)

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

#define FIGURE(of, name) gck_set_item(&into, #name, PyLong_FromLongLong(c.of name));
static PyObject *dict_of(counts c)
{
    PyObject *into = PyDict_New();

    FIGURE(, kept) FIGURE(, small)
    FIGURE(store., memory) FIGURE(store., memory_used) FIGURE(store., memory_peak) FIGURE(store., memory_taken)
    FIGURE(store., pinned) FIGURE(store., file_used) FIGURE(store., file_peak)
#define COUNTED(name) FIGURE(store., name)
    STORE_COUNTS(COUNTED)
#undef COUNTED
    FIGURE(offloaders., ring) FIGURE(offloaders., ring_used) FIGURE(offloaders., ring_peak)
    FIGURE(offloaders., ring_lost) FIGURE(offloaders., bytes_out) FIGURE(offloaders., bytes_in)
    FIGURE(offloaders., copies_out) FIGURE(offloaders., copies_in) FIGURE(offloaders., read_in_ring)
    FIGURE(offloaders., prefetched) FIGURE(offloaders., misses_out) FIGURE(offloaders., misses_in)
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

#define COUNTED(name) of_ended.store.name += last.store.name;
    STORE_COUNTS(COUNTED)
#undef COUNTED
    gck_offloader_add_counts(&of_ended.offloaders, &last.offloaders);
    of_ended.kept += last.kept;
    of_ended.small += last.small;
}

PyObject *gck_figures_of_ended_places(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *found = dict_of(of_ended);

    if (restarts(args)) {
        of_ended = (counts){.kept = 0};
    }
    return found;
}
