/* generators.c: asks generators themselves where torch's modules keep them; the rare rest is in Python.
 *
 * States are a list: (generator, state, device) here, (device type, index, state) from Python. */
#include "torch/generators.h"

#include "torch/calls.h"
#include "torch/device.h"
#include "torch/error.h"
#include "torch/input.h"
#include "torch/rng.h"
#include "torch/stream.h"
#include "torch/tensor.h"

enum { MOST_DEVICES = 16, MOST_DEPTH = 16 };

typedef struct {
    int devices[MOST_DEVICES], n;
} found;

/* Was everything below x seen?  1, and its devices are in *f; 0: Python has to look; -1. */
static int look(gck_py *py, PyObject *x, int depth, found *f);

static int look_at_tensor(gck_py *py, PyObject *x, found *f)
{
    gck_dl_tensor dl;
    const int shown = gck_read_dlpack(py, x, &dl);
    const int device = shown > 0 ? gck_device_of_dlpack(dl.device) : GCK_NO_DEVICE;

    if (shown < 0 || device == GCK_NO_DEVICE) {
        return shown < 0 ? -1 : 0;
    }
    for (int i = 0; i < f->n; i++) {
        if (f->devices[i] == device) {
            return 1;
        }
    }
    if (device >= 0) {
        if (f->n == MOST_DEVICES) {
            return 0;
        }
        f->devices[f->n++] = device;
    }
    return 1;
}

static int look_at_items(gck_py *py, PyObject *x, int depth, found *f)
{
    int seen = 1;

    for (Py_ssize_t i = 0; seen > 0 && i < gck_items(x); i++) {
        seen = look(py, gck_item(x, i), depth + 1, f);
    }
    return seen;
}

static int look_at_values(gck_py *py, PyObject *x, int depth, found *f)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int seen = 1;

    while (seen > 0 && PyDict_Next(x, &at, &key, &value)) {
        seen = look(py, value, depth + 1, f);    /* runs no Python */
    }
    return seen;
}

/* 1 when torch's pytrees take x for a leaf; 0: they may look into it; -1. */
static int is_leaf(const gck_py *py, PyObject *x)
{
    PyTypeObject *type = Py_TYPE(x);
    int known;

    if (Py_TYPE((PyObject *)type) != &PyType_Type || PyType_IsSubtype(type, &PyTuple_Type)
        || PyType_IsSubtype(type, (PyTypeObject *)py->Tensor)) {
        return 0;                                /* its class may have a hash of its own */
    }
    known = PyDict_Contains(py->supported_nodes, (PyObject *)type);
    return known < 0 ? -1 : !known;
}

static int look(gck_py *py, PyObject *x, int depth, found *f)
{
    if (gck_is_plain_tensor(py, x)) {
        return look_at_tensor(py, x, f);
    }
    if (depth == MOST_DEPTH) {
        return 0;
    }
    return PyTuple_CheckExact(x) || PyList_CheckExact(x) ? look_at_items(py, x, depth, f)
         : PyDict_CheckExact(x)                          ? look_at_values(py, x, depth, f)
         : is_leaf(py, x);
}

/* Of torch's device types: new reference to the module of one, e.g. torch.cuda; NULL without an exception: none. */
static PyObject *module_of(const gck_py *py, PyObject *type)
{
    GCK_SCOPED PyObject *torch = PyImport_GetModule(py->names.torch);
    return torch != NULL ? gck_optional_attribute(torch, type) : NULL;
}

static int is_initialized(const gck_py *py, PyObject *module)
{
    PyObject *value = gck_optional_attribute(module, py->names._initialized);

    return value != NULL || PyErr_Occurred() ? gck_is_true(value) : 0;
}

int gck_accelerator_initialized(const gck_py *py)
{
    GCK_SCOPED PyObject *module = py->accelerator != Py_None ? module_of(py, py->accelerator) : NULL;
    return module != NULL ? is_initialized(py, module) : PyErr_Occurred() ? -1 : 0;
}

/* New reference: the default generator of a device; NULL without an exception: only Python reaches it. */
static PyObject *generator_of(const gck_py *py, PyObject *module, int device)
{
    GCK_SCOPED PyObject *all = gck_optional_attribute(module, py->names.default_generators);
    const int index = gck_device_index(device);
    return all != NULL && index < gck_items(all) ? Py_NewRef(gck_item(all, index)) : NULL;
}

/* Append (generator, its state, device).  0 or -1. */
static int append_state(const gck_py *py, PyObject *states, PyObject *generator, int device)
{
    PyObject *state = PyObject_CallMethodObjArgs(generator, py->names.get_state, NULL);

    return state == NULL ? -1 : gck_append(states, Py_BuildValue("(ONi)", generator, state, device));
}

/* The states of these devices: 1; 0: Python has to ask; -1. */
static int capture(const gck_py *py, const found *f, PyObject **states)
{
    int status = 1;

    *states = PyList_New(0);
    for (int i = 0; *states != NULL && status > 0 && i < f->n; i++) {
        const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(f->devices[i]));
        GCK_SCOPED PyObject *type = PyUnicode_InternFromString(kind->name);
        GCK_SCOPED PyObject *module = type != NULL ? module_of(py, type) : NULL;
        const int initialized = module != NULL ? is_initialized(py, module) : 0;
        GCK_SCOPED PyObject *generator = initialized > 0 ? generator_of(py, module, f->devices[i]) : NULL;

        status = PyErr_Occurred() ? -1 : module != NULL && !initialized ? 1
               : generator == NULL ? 0 : append_state(py, *states, generator, f->devices[i]) < 0 ? -1 : 1;
    }
    if (status <= 0 || *states == NULL || PyList_Size(*states) == 0) {
        Py_CLEAR(*states);
    }
    return PyErr_Occurred() ? -1 : status;
}

/* Of several device types torch takes one, and warns. */
static int is_one_kind(const found *f)
{
    for (int i = 1; i < f->n; i++) {
        if (gck_device_kind_of(f->devices[i]) != gck_device_kind_of(f->devices[0])) {
            return 0;
        }
    }
    return 1;
}

int gck_device_rng_capture(gck_py *py, PyObject *args, PyObject *kwargs, int preserve, int exact, PyObject **states)
{
    found f = {.n = 0};
    int seen;

    *states = NULL;
    if (py->accelerator == Py_None || (!preserve && !exact)) {
        return 0;
    }
    seen = look(py, args, 0, &f);
    seen = seen > 0 && !exact && kwargs != NULL ? look(py, kwargs, 0, &f) : seen;
    seen = seen > 0 && exact && !is_one_kind(&f) ? 0 : seen;
    if (seen > 0 && (f.n == 0 || !preserve)) {   /* faster */
        return 0;
    }
    seen = seen > 0 ? capture(py, &f, states) : seen;
    if (seen != 0) {
        return seen < 0 ? -1 : 0;
    }
    *states = PyObject_CallFunction(py->call.device_rng_capture, "OOii", args, kwargs ? kwargs : Py_None, preserve,
                                    exact);
    if (*states == Py_None) {
        Py_CLEAR(*states);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Was this state taken by Python? */
static int is_from_python(PyObject *one) { return PyUnicode_Check(PyTuple_GetItem(one, 0)); }

/* *device: that of a state; GCK_NO_DEVICE: it is of no known kind.  0 or -1. */
static int device_of(PyObject *one, int *device)
{
    const int python = is_from_python(one);
    const int number = (int)PyLong_AsLong(PyTuple_GetItem(one, python ? 1 : 2));
    const gck_device_kind *kind;

    *device = python ? GCK_NO_DEVICE : number;
    for (int k = 0; python && (kind = gck_device_kind_at(k)) != NULL; k++) {
        if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(one, 0), kind->name) == 0) {
            *device = gck_device_number(k, number);
        }
    }
    return number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Is what is queued now captured in a graph?  1, 0 or -1; a device that only fake tensors have, without a driver, has
 * no streams. */
static int is_captured(const gck_py *py, int device)
{
    const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(device));
    void *stream;
    int driver, runtime;

    if (device < 0 || kind->is_captured == NULL) {
        return 0;
    }
    if (gck_stream_of(py->dlpack, device, &stream) == 0) {
        return gck_stream_is_captured(device, stream);
    }
    if (kind->check(&driver, &runtime) == GCK_OK) {
        return gck_stream_unknown();
    }
    PyErr_Clear();
    return 0;
}

/* A graph that is replayed draws other numbers each time, which no state of now tells. */
int gck_device_rng_refuse_captured(const gck_py *py, PyObject *states)
{
    for (Py_ssize_t i = 0; states != NULL && i < gck_items(states); i++) {
        int device, captured;
        if (device_of(gck_item(states, i), &device) < 0 || (captured = is_captured(py, device)) < 0) {
            return -1;
        }
        if (captured) {
            return gck_done(PyErr_Format(
                PyExc_RuntimeError,
                "gradckpt: a region in a captured graph cannot draw the forward's random numbers again; "
                "pass preserve_rng_state=False and draw none inside"));
        }
    }
    return 0;
}

int gck_device_rng_swap(const gck_py *py, PyObject *states, PyObject **previous)
{
    int status = 0;

    if (is_from_python(gck_item(states, 0))) {
        *previous = PyObject_CallFunctionObjArgs(py->call.device_rng_swap, states, NULL);
        return *previous != NULL ? 0 : -1;
    }
    *previous = PyList_New(0);
    for (Py_ssize_t i = 0; *previous != NULL && status == 0 && i < gck_items(states); i++) {
        PyObject *one = gck_item(states, i), *generator = PyTuple_GetItem(one, 0);
        int device;
        status = device_of(one, &device) < 0 || append_state(py, *previous, generator, device) < 0 ? -1
               : gck_done(PyObject_CallMethodObjArgs(generator, py->names.set_state, PyTuple_GetItem(one, 1), NULL));
    }
    if (*previous != NULL && PyList_Size(*previous) == 0) {
        Py_CLEAR(*previous);
    }
    return *previous != NULL ? status : -1;
}

/* ---- what one operator draws ----
 *
 * Running the operator again and dropping its result would not do: how many numbers it draws may
 * depend on values (poisson), and those of a recompute are approximate. */

/* 1 when the operator is one of torch's own; 0, also for a higher order operator; -1. */
static int is_of_torch(PyObject *op)
{
    GCK_SCOPED PyObject *space = PyObject_GetAttrString(op, "namespace");
    const int of_torch = space != NULL && PyUnicode_Check(space)
                      && PyUnicode_CompareWithASCIIString(space, "aten") == 0;

    return space == NULL ? gck_clear_attribute_error() : of_torch;
}

int gck_op_draws(const gck_py *py, PyObject *op)
{
    const int of_torch = is_of_torch(op);
    GCK_SCOPED PyObject *tags = of_torch > 0 ? PyObject_GetAttrString(op, "tags") : NULL;
    return of_torch == 0 ? 1 : tags != NULL ? PySequence_Contains(tags, py->draws) : -1;
}

/* *generator: new reference; NULL: the CPU's default one; None: nothing is drawn.  0 or -1. */
static int generator_drawn_from(const gck_py *py, PyObject *args, PyObject *kwargs, PyObject **generator)
{
    PyObject *x = kwargs == NULL && PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL;
    int on_cpu = x != NULL ? gck_is_tensor(py, x) : 0;

    for (Py_ssize_t i = 1; on_cpu > 0 && i < PyTuple_Size(args); i++) {
        on_cpu = Py_TYPE(PyTuple_GetItem(args, i)) != Py_TYPE(py->rng.generator);
    }
    on_cpu = on_cpu > 0 ? gck_attr_is_true(x, py->names.is_cpu) : on_cpu;
    *generator = on_cpu != 0 ? NULL : PyObject_CallFunction(py->call.generator_of, "OO", args,
                                                          kwargs != NULL ? kwargs : Py_None);
    if (*generator == py->rng.generator) {         /* faster: its bytes can be compared */
        Py_CLEAR(*generator);
        return 0;
    }
    return on_cpu > 0 || *generator != NULL ? 0 : -1;
}

static PyObject *state_of(gck_py *py, PyObject *generator)
{
    return generator == NULL ? gck_rng_stash(&py->rng)
                             : PyObject_CallMethodObjArgs(generator, py->names.get_state, NULL);
}

int gck_draw_begin(gck_py *py, PyObject *args, PyObject *kwargs, gck_draw *draw)
{
    draw->before = NULL;
    if (generator_drawn_from(py, args, kwargs, &draw->generator) < 0) {
        return -1;
    }
    if (draw->generator != Py_None && (draw->before = state_of(py, draw->generator)) == NULL) {
        Py_CLEAR(draw->generator);
        return -1;
    }
    return 0;
}

void gck_draw_clear(gck_draw *draw)
{
    Py_CLEAR(draw->generator);
    Py_CLEAR(draw->before);
}

PyObject *gck_draw_end(gck_py *py, gck_draw *draw)
{
    GCK_CLEARED_BY(gck_draw_clear) gck_draw own = *draw;
    GCK_SCOPED PyObject *after = own.before != NULL ? state_of(py, own.generator) : Py_NewRef(Py_None);

    *draw = (gck_draw){NULL, NULL};
    return after == own.before || after == Py_None ? Py_NewRef(Py_None)      /* the CPU's: nothing was drawn */
         : after != NULL ? PyTuple_Pack(2, own.before, after) : NULL;
}

int gck_draw_repeat(gck_py *py, PyObject *args, PyObject *kwargs, PyObject *drawn)
{
    GCK_CLEARED_BY(gck_draw_clear) gck_draw now = {NULL, NULL};
    PyObject *before = PyTuple_GetItem(drawn, 0), *after = PyTuple_GetItem(drawn, 1);
    int status = gck_draw_begin(py, args, kwargs, &now);

    if (status == 0 && now.before != NULL) {
        status = now.before == before ? 1 : gck_is_true(PyObject_CallMethod(now.before, "equal", "O", before));
        if (status > 0) {
            status = now.generator == NULL ? gck_rng_set(&py->rng, after)
                : gck_done(PyObject_CallMethodObjArgs(now.generator, py->names.set_state, after, NULL));
        }
    }
    return status < 0 ? -1 : 0;
}
