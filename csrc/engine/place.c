/* place.c: a store of the process, and an offloader for each device that has payloads there. */
#include "engine/place.h"

#include "engine/place_devices.h"
#include "engine/place_figures.h"
#include "offload/offloader.h"
#include "torch/calls.h"
#include "torch/simulated.h"
#include "torch/stream.h"

#include <errno.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

/* ---- errors ---- */

/* A payload stays on its device: say why, once.  refused: it should not have to.  0, or -1: that is an error. */
static int stays(gck_state *state, gck_place_object *self, const char *why, int refused)
{
    return gck_done(PyObject_CallFunction(state->py.call.stays_on_device, "Osi", self, why, refused)) < 0 ? -1 : 0;
}

static int cannot_read(const gck_placed *placed, int64_t nbytes, const char *why)
{
    const gck_place_object *self = (gck_place_object *)placed->place;

    return gck_done(PyErr_Format(
        PyExc_RuntimeError, "gradckpt: %lld bytes that were offloaded to %s cannot be read: %s; gradients of "
        "this step cannot be computed, so run it again", (long long)nbytes,
        self->directory != NULL ? "a disk" : "host memory", why));
}

/* Raise what keeps a store from being made; -1. */
static int cannot_be_made(const char *directory, int status)
{
    if (status == GCK_STORE_NO_MEMORY || status == ENOMEM || directory == NULL) {
        return gck_done(PyErr_Format(
            PyExc_MemoryError, "gradckpt: offload= finds no memory for its budget; lower host_budget"));
    }
    return gck_done(PyErr_Format(
        PyExc_ValueError, "gradckpt: offload='disk' cannot use the directory %s: %s; pass another one, as "
        "in gradckpt.Offload('disk', directory='/scratch')", directory,
        status == EINVAL || status == EOPNOTSUPP ? "its file system has no O_DIRECT"
        : gck_byte_store_text(status)));
}

/* What went wrong with bytes of a device; borrowed. */
static const char *error_of(const gck_placed *placed, int status)
{
    const gck_place_object *self = (gck_place_object *)placed->place;

    return gck_place_device_text(gck_place_device_with(self, gck_offloaded_of(placed->bytes)), status);
}

/* ---- the place ---- */

/* In a forked child all is the parent's: begin anew.  0 or -1. */
static int have_store(gck_place_object *self)
{
    const gck_byte_store_options options = {
        .memory = self->host_budget, .prefetch = self->prefetch, .threads = 2,
        .directory = self->directory != NULL ? PyBytes_AsString(self->directory) : NULL,
    };
    gck_byte_store *made;
    int status;

    if (self->store != NULL && self->process == getpid()) {
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS
    status = gck_byte_store_new(&options, &made);
    Py_END_ALLOW_THREADS
    if (status != 0) {
        return cannot_be_made(options.directory, status);
    }
    if (self->store != NULL && self->process == getpid()) {      /* another thread was faster */
        Py_BEGIN_ALLOW_THREADS
        gck_byte_store_free(made);
        Py_END_ALLOW_THREADS
        return 0;
    }
    self->store = made;
    self->process = getpid();
    self->devices = NULL;
    self->kept = 0;
    return 0;
}

/* ---- payloads ---- */

static int take_on_host(gck_state *state, gck_place_object *self, int64_t nbytes, gck_placed *placed)
{
    int status;

    Py_BEGIN_ALLOW_THREADS
    status = gck_byte_store_reserve(self->store, nbytes, &placed->item);
    Py_END_ALLOW_THREADS
    self->kept += status != 0;
    return status == 0 ? 1 : stays(state, self, gck_byte_store_text(status), 1);
}

static int take_on_device(gck_state *state, gck_place_object *self, int64_t nbytes, int device, void *stream,
                          gck_placed *placed)
{
    gck_place_device *of = NULL;
    const char *why = NULL;
    int status = gck_place_device_have(self, device, stream, &of, &why);

    if (status <= 0) {
        self->kept += status == 0;
        return status < 0 ? -1 : stays(state, self, why, 1);
    }
    if (gck_place_device_have_ring(state, self, of, nbytes, stream) < 0) {
        return -1;
    }
    for (int again = 1; again; again = status == GCK_STORE_FULL && gck_place_free_ended()) {
        Py_BEGIN_ALLOW_THREADS
        status = gck_offloader_take(of->offloader, nbytes, stream, &placed->bytes);
        Py_END_ALLOW_THREADS
    }
    self->kept += status != 0 && status != GCK_STORE_RING;      /* which the ring counts */
    if (status == 0 && gck_byte_store_was_refused_pins(self->store)
        && gck_done(PyObject_CallFunctionObjArgs(state->py.call.pinning_refused, (PyObject *)self, NULL)) < 0) {
        gck_offloaded_drop(placed->bytes);
        placed->bytes = NULL;
        return -1;
    }
    return status == 0 ? 1 : stays(state, self, gck_place_device_text(of, status), 1);
}

int gck_placed_take(gck_state *state, PyObject *place, int64_t nbytes, int device, void *stream, gck_placed *placed)
{
    gck_place_object *self = (gck_place_object *)place;
    int status;

    *placed = (gck_placed){.place = NULL};
    if (nbytes <= 0 || gck_is_simulated()) {
        return 0;
    }
    if (device < 0 && self->directory == NULL) {
        const int first = !self->in_host;
        self->kept++;
        self->in_host = 1;
        return first ? stays(state, self, "it is in host memory already", 0) : 0;
    }
    if (nbytes < self->min_bytes) {
        self->small++;
        return 0;
    }
    if (have_store(self) < 0) {
        return -1;
    }
    status = device < 0 ? take_on_host(state, self, nbytes, placed)
                        : take_on_device(state, self, nbytes, device, stream, placed);
    placed->place = status == 1 ? Py_NewRef(place) : NULL;
    return status;
}

int gck_place_most_unwritten(PyObject *place) { return ((gck_place_object *)place)->payloads - 1; }

int gck_placed_take_simulated(PyObject *place, int64_t nbytes, gck_placed *placed)
{
    const gck_place_object *self = (gck_place_object *)place;
    const int device = gck_counts_as_device(-1), moves = device || self->directory != NULL;
    const int fits = nbytes <= self->host_budget && (!device || self->ring == GCK_PLACE_AUTO || nbytes <= self->ring);
    const int taken = moves && fits && nbytes >= self->min_bytes && nbytes > 0;

    *placed = (gck_placed){.place = taken ? Py_NewRef(place) : NULL};
    return taken;
}

int gck_placed_is_near(const gck_placed *placed)
{
    return placed->item != NULL ? gck_byte_store_is_near(placed->item)
         : placed->bytes != NULL ? gck_offloaded_is_near(placed->bytes) : gck_is_placed(placed);    /* simulated */
}

gck_placed gck_placed_again(const gck_placed *placed)
{
    return (gck_placed){Py_XNewRef(placed->place), placed->bytes, placed->item};
}

void *gck_placed_memory(const gck_placed *placed)
{
    return placed->item != NULL ? gck_byte_store_memory(placed->item)
         : placed->bytes != NULL ? gck_offloaded_memory(placed->bytes) : gck_simulated_memory();
}

/* An answer of the device that its errors come from.  0 or -1. */
static int answered(const gck_placed *placed, int status)
{
    if (status != 0) {
        PyErr_Format(PyExc_RuntimeError, "gradckpt: a device could not offload a payload: %s; train without offload=",
                     error_of(placed, status));
    }
    return status == 0 ? 0 : -1;
}

int gck_placed_written(gck_placed *placed, void *stream)
{
    int status = 0;

    if (placed->item != NULL) {
        gck_byte_store_filled(placed->item);
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS
    status = placed->bytes != NULL ? gck_offloaded_written(placed->bytes, stream) : 0;
    Py_END_ALLOW_THREADS
    return answered(placed, status);
}

/* A graph that reads them would read at each launch what has their memory then.  0 or -1. */
static int may_be_read(const gck_placed *placed, void *stream)
{
    const gck_offloader *offloader = placed->bytes != NULL ? gck_offloaded_of(placed->bytes) : NULL;
    const gck_place_device *of = offloader != NULL      /* NULL, too: of the process that this one was forked from */
        ? gck_place_device_with((gck_place_object *)placed->place, offloader) : NULL;

    if (of != NULL && gck_offloader_graph(offloader) == 0 && gck_stream_is_captured(of->device, stream)) {
        return gck_done(PyErr_Format(
            PyExc_RuntimeError, "gradckpt: a captured backward cannot read what was offloaded before the "
            "capture; capture the forward, too"));
    }
    return 0;
}

int gck_placed_bring(gck_placed *placed, void *stream)
{
    int status;

    if (may_be_read(placed, stream) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = placed->item != NULL ? gck_byte_store_hold(placed->item)
           : placed->bytes != NULL ? gck_offloaded_bring(placed->bytes, stream) : 0;
    Py_END_ALLOW_THREADS
    if (status == 0 || status == GCK_STORE_RING) {
        return status == 0;
    }
    return placed->item != NULL
        ? cannot_read(placed, gck_byte_store_nbytes(placed->item), gck_byte_store_text(status))
        : cannot_read(placed, gck_offloaded_nbytes(placed->bytes), error_of(placed, status));
}

int gck_placed_let_go(gck_placed *placed, void *stream)
{
    int status;

    if (placed->item != NULL) {
        gck_byte_store_release(placed->item);
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS
    status = placed->bytes != NULL ? gck_offloaded_let_go(placed->bytes, stream) : 0;
    Py_END_ALLOW_THREADS
    return answered(placed, status);
}

int gck_placed_copy(gck_placed *placed, int64_t from, int64_t nbytes, void *to, void *stream)
{
    int status;

    Py_BEGIN_ALLOW_THREADS
    if (placed->item == NULL) {
        status = placed->bytes != NULL ? gck_offloaded_copy(placed->bytes, from, nbytes, to, stream) : 0;
    } else if ((status = gck_byte_store_hold(placed->item)) == 0) {
        memcpy(to, (char *)gck_byte_store_memory(placed->item) + from, (size_t)nbytes);
        gck_byte_store_release(placed->item);
    }
    Py_END_ALLOW_THREADS
    if (status == 0) {
        return 0;
    }
    return cannot_read(placed, nbytes, placed->item != NULL ? gck_byte_store_text(status)
                                                            : error_of(placed, status));
}

void gck_placed_drop(gck_placed *placed)
{
    const gck_placed old = *placed;

    *placed = (gck_placed){.place = NULL};
    if (old.item != NULL) {
        gck_byte_store_drop(old.item);
    } else if (old.bytes != NULL) {
        gck_offloader *of = gck_offloaded_of(old.bytes);
        gck_offloaded_drop(old.bytes);
        if (gck_offloader_graph(of) != 0 && gck_offloader_is_over(of)) {
            gck_place_graph_ended();
        }
    }
    Py_XDECREF(old.place);
}

int gck_place_of(gck_state *state, PyObject *offload, PyObject **place)
{
    *place = NULL;
    if (offload == NULL || offload == Py_None || offload == Py_False) {
        return 0;
    }
    if (Py_TYPE(offload) == state->Place) {
        *place = Py_NewRef(offload);
    } else if (offload == state->latest_place.offload) {
        *place = Py_NewRef(state->latest_place.place);
    } else if ((*place = PyObject_CallFunction(state->py.call.place_of, "(O)", offload)) == NULL) {
        return -1;
    } else if (PyUnicode_Check(offload) || !PyMapping_Check(offload)) {      /* what cannot change */
        GCK_SCOPED PyObject *old_offload = state->latest_place.offload, *old_place = state->latest_place.place;
        state->latest_place.offload = Py_NewRef(offload);
        state->latest_place.place = Py_NewRef(*place);
    }
    return 0;
}

/* ---- the Python type ---- */

static void place_dealloc(PyObject *op)
{
    gck_place_object *self = (gck_place_object *)op;

    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    if (self->store != NULL) {
        gck_place_figures_stay(self);
    }
    gck_place_devices_free(self);
    if (self->store != NULL) {
        Py_BEGIN_ALLOW_THREADS                   /* its threads end */
        gck_byte_store_free(self->store);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(self->directory);
    gck_object_free(op);
}

static PyObject *place_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static const char *const names[] = {"directory", "host_budget", "ring", "held", "prefetch", "min_bytes", "payloads",
                                        NULL};
    PyObject *path = NULL, *directory;
    GCK_SCOPED gck_place_object *self = (gck_place_object *)PyType_GenericAlloc(type, 0);

    if (self == NULL) {
        return NULL;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OLLLiLi:Place", (char **)names, &directory, &self->host_budget,
                                     &self->ring, &self->held, &self->prefetch, &self->min_bytes, &self->payloads)
        || (directory != Py_None && !PyUnicode_FSConverter(directory, &path))) {
        return NULL;
    }
    self->directory = path;
    return self->host_budget < GCK_FILE_ALIGNMENT
         ? PyErr_Format(PyExc_ValueError, "gradckpt: host_budget is %lld bytes; pass 4096 or more", self->host_budget)
         : have_store(self) < 0 ? NULL : Py_NewRef((PyObject *)self);
}

static PyObject *place_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const gck_state *state = PyType_GetModuleState(Py_TYPE(op));

    return state != NULL ? PyObject_CallFunction(state->py.call.place_again, "O", op) : NULL;
}

static PyMethodDef place_methods[] = {
    {"__reduce__", place_reduce, METH_NOARGS, "__reduce__($self, /)\n--\n\nCopies and pickles share the place."},
    {"figures", gck_place_figures, METH_VARARGS,
     "figures($self, restart=False, /)\n--\n\nReturn bytes and calls since a restart."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef place_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(gck_place_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot place_slots[] = {
    {Py_tp_members, place_members},
    {Py_tp_new, place_new},
    {Py_tp_dealloc, place_dealloc},
    {Py_tp_methods, place_methods},
    {Py_tp_doc, "Where payloads live between forward and backward, see gradckpt.Offload."},
    {0, NULL},
};

PyType_Spec gck_place_spec = {
    .name = "gradckpt._C.Place",
    .basicsize = sizeof(gck_place_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = place_slots,
};
