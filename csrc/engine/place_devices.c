/* place_devices.c: the offloaders of a place.
 *
 * A graph that is captured has one for itself (offload/offloader_graph.h), and the place lives as long as it: a launch
 * copies into its memory.  CUDA says when a graph is gone, on a thread that may call neither CUDA nor Python; so
 * Python's main thread frees what it had. */
#include "engine/place_devices.h"

#include "offload/offloader.h"
#include "torch/calls.h"
#include "torch/device.h"
#include "torch/input.h"
#include "torch/tensor.h"

#include <unistd.h>

/* Owned: the places that graphs have something of. */
static gck_place_object *with_graphs;

const char *gck_place_device_text(const gck_place_device *of, int status)
{
    return status == GCK_STORE_DEVICE && of != NULL ? gck_device_error(of->device, gck_offloader_status(of->offloader))
                                                    : gck_byte_store_text(status);
}

const gck_place_device *gck_place_device_with(const gck_place_object *place, const gck_offloader *offloader)
{
    const gck_place_device *of = place->devices;

    while (of != NULL && of->offloader != offloader) {
        of = of->next;
    }
    return of;
}

/* What it has counted stays. */
static void device_free(gck_place_object *place, gck_place_device *of)
{
    gck_offloader_figures f;

    if (of->offloader != NULL && place->process == getpid()) {
        gck_offloader_read_figures(of->offloader, 0, &f);
        gck_offloader_add_counts(&place->ended, &f);
    }
    if (of->offloader != NULL) {
        Py_BEGIN_ALLOW_THREADS                   /* its copies end */
        gck_offloader_free(of->offloader);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(of->memory);
    PyMem_Free(of);
}

void gck_place_devices_free(gck_place_object *place)
{
    while (place->devices != NULL) {
        gck_place_device *of = place->devices;
        place->devices = of->next;
        device_free(place, of);
    }
}

/* ---- graphs ---- */

/* Taken out: one of which the graph is gone; NULL: none.  *others: there are more of graphs. */
static gck_place_device *take_over(gck_place_object *place, int *others)
{
    gck_place_device *found = NULL;

    *others = 0;
    for (gck_place_device **at = &place->devices; *at != NULL;) {
        gck_place_device *of = *at;
        if (found == NULL && gck_offloader_is_over(of->offloader)) {
            found = of;
            *at = of->next;
        } else {
            *others |= gck_offloader_graph(of->offloader) != 0;
            at = &of->next;
        }
    }
    return found;
}

int gck_place_free_ended(void)
{
    int freed = 0;

    for (gck_place_object **at = &with_graphs; *at != NULL;) {
        gck_place_object *place = *at;
        int others;
        gck_place_device *of = take_over(place, &others);
        if (of != NULL) {
            freed = 1;
            device_free(place, of);              /* other threads may run: from the start */
            at = &with_graphs;
        } else if (others) {
            at = &place->next_with_graphs;
        } else {
            *at = place->next_with_graphs;
            place->graphs = 0;
            Py_DECREF((PyObject *)place);
            at = &with_graphs;
        }
    }
    return freed;
}

/* Py_AddPendingCall(). */
static int free_ended(void *Py_UNUSED(unused))
{
    gck_place_free_ended();
    return 0;
}

void gck_place_graph_ended(void)
{
    if (Py_IsInitialized()) {
        Py_AddPendingCall(free_ended, NULL);     /* when it refuses, the next one frees this, too */
    }
}

static void remember(gck_place_object *place)
{
    if (!place->graphs) {
        place->graphs = 1;
        place->next_with_graphs = with_graphs;
        with_graphs = (gck_place_object *)Py_NewRef((PyObject *)place);
    }
}

/* ---- making ---- */

/* 1; 0: see *why; -1. */
static int device_new(gck_place_object *place, int device, const gck_link *link, uint64_t graph, void *stream,
                      gck_place_device **made, const char **why)
{
    const gck_offloader_options options = {.held = place->held, .prefetch = place->prefetch, .graph = graph,
                                           .stream = stream, .ended = gck_place_graph_ended};
    gck_place_device *of = PyMem_Calloc(1, sizeof *of);
    int status;

    if (of == NULL || (of->memory = PyList_New(0)) == NULL) {
        PyMem_Free(of);
        return gck_done(PyErr_NoMemory());
    }
    of->device = device;
    status = gck_offloader_new(link, gck_device_index(device), place->store, &options, &of->offloader);
    if (status != 0) {                           /* with the GIL: no other thread makes it */
        *why = gck_place_device_text(of->offloader != NULL ? of : NULL, status);
        device_free(place, of);
        return 0;
    }
    of->next = place->devices;
    *made = place->devices = of;
    if (graph != 0) {
        remember(place);
    }
    return 1;
}

int gck_place_device_have(gck_place_object *place, int device, void *stream, gck_place_device **found,
                          const char **why)
{
    const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(device));
    const int index = gck_device_index(device);
    uint64_t graph = 0;
    int shared = 0, status;

    if (kind == NULL || kind->link == NULL) {
        *why = "gradckpt cannot copy from this device";
        return 0;
    }
    if ((status = kind->link->graph_of(index, stream, &graph)) != GCK_OK) {
        *why = gck_device_error(device, status);
        return 0;
    }
    if (graph != 0) {
        gck_place_free_ended();                  /* the main thread may not have come to it */
    }
    for (gck_place_device *of = place->devices; of != NULL; of = of->next) {
        if (of->device == device && gck_offloader_graph(of->offloader) == graph) {
            *found = of;
            return 1;
        }
    }
    if (kind->link->is_shared(index, &shared) == GCK_OK && shared) {
        *why = "the memory of this device is the host's";
        return 0;
    }
    return device_new(place, device, kind->link, graph, stream, found, why);
}

int gck_place_device_have_ring(gck_state *state, const gck_place_object *place, gck_place_device *of, int64_t nbytes,
                               void *stream)
{
    const int64_t more = place->ring != GCK_PLACE_AUTO ? (PyList_Size(of->memory) == 0 ? place->ring : 0)
                                                       : gck_offloader_wants(of->offloader, nbytes, place->payloads);
    gck_dl_tensor dl;
    int status = -1;

    if (more == 0) {
        return 0;
    }
    GCK_SCOPED PyObject *memory = gck_bytes_empty(&state->py, more, of->device);
    const int shown = memory != NULL ? gck_read_dlpack(&state->py, memory, &dl) : -1;
    if (shown == 0) {
        PyErr_SetString(PyExc_RuntimeError, "gradckpt: offload= begins under a mode that makes other tensors "
                                            "(FakeTensorMode); run a step outside of it first");
    } else if (shown > 0 && PyList_Append(of->memory, memory) == 0) {
        status = gck_offloader_add(of->offloader, (char *)dl.data + dl.byte_offset, more, stream);
        if (status != 0) {
            PyErr_Format(PyExc_RuntimeError, "gradckpt: offload= cannot use a device: %s; train without it",
                         gck_place_device_text(of, status));
            status = -1;
        }
    }
    return status;
}
