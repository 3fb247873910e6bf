/* payload_bytes.c: the bytes of a payload, and the latest payloads. */
#include "engine/payload/payload_bytes.h"

#include "torch/abi.h"
#include "torch/calls.h"
#include "torch/device.h"
#include "torch/error.h"
#include "torch/input.h"
#include "torch/stream.h"
#include "torch/tensor.h"

#include <stdlib.h>
#include <string.h>

gck_arrays gck_arrays_again(gck_arrays arrays)
{
    return (gck_arrays){Py_XNewRef(arrays.codes), Py_XNewRef(arrays.scales), arrays.near};
}

void gck_arrays_clear(gck_arrays *arrays)
{
    const gck_arrays old = *arrays;

    *arrays = (gck_arrays){.codes = NULL};
    Py_XDECREF(old.codes);
    Py_XDECREF(old.scales);
}

/* The memory of an array.  Outer saved-tensor hooks may have returned this tensor, so it is checked: a
 * wrong one would be read out of bounds, or as nonsense. */
static int view_array(gck_payload *self, PyObject *array, int64_t nbytes, void **data)
{
    gck_dl_tensor dl;
    const int shown = gck_read_dlpack(&self->state->py, array, &dl);

    if (shown < 0) {
        return -1;
    }
    if (!shown || dl.dtype.code != GCK_DL_UINT || dl.dtype.bits != 8 || dl.ndim != 1 || dl.shape[0] != nbytes
        || (dl.strides != NULL && nbytes > 1 && dl.strides[0] != 1)
        || gck_device_of_dlpack(dl.device) != self->device) {
        GCK_SCOPED PyObject *device = gck_device_object(&self->state->py, self->device);
        return gck_done(PyErr_Format(
            PyExc_RuntimeError, "gradckpt: an outer saved-tensor hook returned another tensor (%R) for a "
            "payload of %lld uint8 bytes on %S; return what was packed",
            Py_TYPE(array), (long long)nbytes, device != NULL ? device : Py_None));
    }
    *data = (char *)dl.data + dl.byte_offset;
    return 0;
}

static int never_encoded(void)
{
    return gck_done(PyErr_Format(
        PyExc_RuntimeError,
        "gradckpt: this tensor was never encoded, since an error ended its forward; run that again"));
}

int gck_payload_view(gck_payload *self, gck_arrays arrays, gck_bytes *bytes)
{
    if (self->unwritten) {
        return never_encoded();
    }
    if (arrays.near == NULL && arrays.codes == NULL && gck_is_placed(&self->placed)) {
        arrays.near = gck_placed_memory(&self->placed);      /* it is being written */
    }
    if (arrays.near != NULL || (arrays.codes == NULL && self->own.handle != NULL)) {     /* its data may be NULL */
        *bytes = gck_in_one(arrays.near != NULL ? arrays.near : self->own.data, self->lengths);
        return 0;
    }
    arrays = arrays.codes == NULL ? self->arrays : arrays;
    bytes->scales = NULL;
    return view_array(self, arrays.codes, self->lengths.codes, &bytes->codes) < 0
        || (arrays.scales != NULL
            && view_array(self, arrays.scales, self->lengths.scales, &bytes->scales) < 0) ? -1 : 0;
}

int gck_payload_bring(gck_payload *self, void *stream, gck_arrays *arrays)
{
    const int brought = !gck_is_placed(&self->placed) ? 0 : self->unwritten ? never_encoded()
                      : gck_placed_bring(&self->placed, stream);

    *arrays = (gck_arrays){.near = brought > 0 ? gck_placed_memory(&self->placed) : NULL};
    return brought;
}

int gck_payload_read(gck_payload *self, void *stream, gck_arrays *arrays)
{
    *arrays = gck_arrays_again(self->arrays);
    if (!gck_payload_has_bytes(self)) {
        return 0;
    }
    return gck_is_placed(&self->placed) ? gck_payload_bring(self, stream, arrays) : 1;
}

int gck_payload_has_read(gck_payload *self, void *stream, gck_arrays *arrays, int status)
{
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();

    if (arrays->near != NULL && gck_placed_let_go(&self->placed, stream) < 0) {
        status = -1;
    }
    gck_error_keep(&error);
    gck_arrays_clear(arrays);
    return status;
}

int gck_payload_lay_out(gck_payload *self, const gck_tensor *x, int exact)
{
    const int ndim = x->ndim, few = ndim <= GCK_FEW_DIMS;
    int64_t strides[GCK_MAX_DIM];

    self->layout = gck_layout_of(x, exact, strides);
    if (self->layout == GCK_LAYOUT_TANGLED) {
        return 1;
    }
    const int shared = self->layout >= GCK_LAYOUT_EXPANDED;
    self->sizes = few && !shared ? self->few : malloc(sizeof(int64_t) * (size_t)(3 * ndim));
    if (self->sizes == NULL) {
        return gck_done(PyErr_NoMemory());
    }
    self->ndim = ndim;
    self->once = shared ? self->sizes + 2 * ndim : NULL;
    memcpy(self->sizes, x->sizes, sizeof(int64_t) * (size_t)ndim);
    memcpy(self->sizes + ndim, self->layout == GCK_LAYOUT_PLAIN ? x->steps : strides, sizeof(int64_t) * (size_t)ndim);
    self->values = self->numel = x->numel;
    if (self->layout == GCK_LAYOUT_RUN) {
        self->values = self->once[0] = gck_reach(ndim, x->sizes, strides);
    }
    for (int d = 0; d < ndim && self->layout == GCK_LAYOUT_EXPANDED; d++) {
        self->once[d] = strides[d] == 0 ? 1 : x->sizes[d];
        self->values /= strides[d] == 0 ? x->sizes[d] : 1;
    }
    self->dtype = x->dtype;
    self->device = x->device;
    self->stream = x->stream;
    self->bytes_in = self->values * (int64_t)gck_itemsize(x->dtype);
    const gck_tensor values = gck_payload_values(self, NULL, NULL);
    self->lengths = gck_lengths_of(self->codec, &values);
    self->nbytes = self->lengths.codes + self->lengths.scales;
    return 0;
}

gck_tensor gck_payload_values(const gck_payload *self, void *data, void *stream)
{
    const int run = self->layout == GCK_LAYOUT_RUN, ndim = run ? 1 : self->ndim;
    const int64_t *sizes = self->once != NULL ? self->once : self->sizes;
    const int64_t *strides = run || self->layout == GCK_LAYOUT_PLAIN ? NULL : self->sizes + self->ndim;
    const int plain = strides == NULL || gck_is_contiguous(ndim, sizes, strides);

    return (gck_tensor){data, self->values, ndim, sizes, plain ? NULL : strides, strides, self->dtype, self->device,
                        stream, self->nbytes};
}

PyObject *gck_payload_within(const gck_payload *self, PyObject *buffer, int64_t offset)
{
    GCK_SCOPED PyObject *view = PyObject_CallMethod(buffer, "as_strided", "NNL", gck_sizes(self->ndim, self->sizes),
                                                    gck_sizes(self->ndim, self->sizes + self->ndim), (long long)offset);
    /* .data: the others in the buffer do not see its version, and autograd no view */
    return view != NULL ? PyObject_GetAttr(view, self->state->py.names.data) : NULL;
}

PyObject *gck_payload_memory(const gck_payload *self)
{
    const gck_py *py = &self->state->py;
    const int64_t *strides = self->sizes + self->ndim;

    if (self->shift == 0) {
        return gck_empty(py, self->ndim, self->sizes, self->layout ? strides : NULL, self->dtype, self->device);
    }
    const int64_t span = self->shift + gck_reach(self->ndim, self->sizes, strides);
    GCK_SCOPED PyObject *buffer = gck_empty(py, 1, &span, NULL, self->dtype, self->device);
    return buffer != NULL ? gck_payload_within(self, buffer, self->shift) : NULL;
}

/* Elements share memory: make it a view of the values, each once.  0 or -1. */
static int see_once(const gck_payload *self, gck_tensor *view)
{
    const size_t bytes = sizeof(int64_t) * (size_t)self->ndim;

    if (view->ndim != self->ndim || memcmp(view->sizes, self->sizes, bytes) != 0
        || memcmp(view->steps, self->sizes + self->ndim, bytes) != 0) {
        return gck_view_changed();
    }
    *view = gck_payload_values(self, view->data, view->stream);
    return 0;
}

int gck_payload_operands(gck_payload *self, PyObject *tensor, gck_arrays arrays, gck_tensor *view, gck_bytes *bytes,
                     gck_how *how)
{
    const gck_tensor was = {.numel = self->numel, .dtype = self->dtype, .device = self->device};

    *how = (gck_how){self->stochastic ? &self->dither : NULL, self->overflow};
    if (gck_payload_view(self, arrays, bytes) < 0 || gck_view_again(&self->state->py, tensor, &was, view) < 0) {
        return -1;
    }
    view->room = self->nbytes;
    return self->once != NULL ? see_once(self, view) : 0;
}

/* New reference: what the outer hooks return; NULL stays NULL. */
static int unpack(const gck_py *py, PyObject *saved, PyObject **array)
{
    *array = saved != NULL ? PyObject_CallMethodObjArgs(saved, py->names.unpack, NULL) : NULL;
    return saved == NULL || *array != NULL ? 0 : -1;
}

/* New reference: a copy of so many of the bytes at its place. */
static PyObject *copy_from_place(gck_payload *self, int64_t from, int64_t nbytes, void *stream)
{
    const gck_py *py = &self->state->py;
    PyObject *copy = gck_bytes_empty(py, nbytes, self->device);
    gck_dl_tensor dl;
    const int shown = copy != NULL ? gck_read_dlpack(py, copy, &dl) : -1;

    if (shown == 0) {
        PyErr_SetString(PyExc_RuntimeError, "gradckpt: a payload that is offloaded cannot come back while a mode makes "
                                            "other tensors (FakeTensorMode); run the backward outside of it");
    }
    if (shown <= 0 || gck_placed_copy(&self->placed, from, nbytes, (char *)dl.data + dl.byte_offset, stream) < 0) {
        Py_CLEAR(copy);
    }
    return copy;
}

static int arrays_from_place(gck_payload *self, gck_arrays *arrays)
{
    void *stream = NULL;

    if (self->device >= 0 && gck_stream_of(self->state->py.dlpack, self->device, &stream) != 0) {
        return gck_stream_unknown();
    }
    arrays->codes = copy_from_place(self, 0, self->lengths.codes, stream);
    if (arrays->codes != NULL && self->lengths.scales > 0) {
        arrays->scales = copy_from_place(self, self->lengths.codes, self->lengths.scales, stream);
    }
    if (arrays->codes == NULL || (self->lengths.scales > 0 && arrays->scales == NULL)) {
        gck_arrays_clear(arrays);
        return -1;
    }
    return 0;
}

int gck_payload_arrays(gck_payload *self, gck_arrays *arrays)
{
    const gck_py *py = &self->state->py;

    *arrays = (gck_arrays){.codes = NULL};
    if (self->merged) {
        return gck_payload_arrays(self->twin, arrays);
    }
    if (gck_is_placed(&self->placed)) {
        return arrays_from_place(self, arrays);
    }
    if (self->own.handle != NULL) {
        PyObject *parts[2];
        if (gck_fresh_parts(py, &self->own, self->lengths.codes, self->lengths.scales, parts) < 0) {
            return -1;
        }
        *arrays = (gck_arrays){parts[0], parts[1]};
        if (self->own.handle != NULL) {          /* else another thread was faster */
            self->arrays = gck_arrays_again(*arrays);
            gck_fresh_free(&self->own);
        }
        return 0;
    }
    if (self->saved.codes != NULL) {
        /* the hooks may run anything */
        GCK_CLEARED_BY(gck_arrays_clear) gck_arrays saved = gck_arrays_again(self->saved);
        if (unpack(py, saved.codes, &arrays->codes) < 0 || unpack(py, saved.scales, &arrays->scales) < 0) {
            gck_arrays_clear(arrays);
            return -1;
        }
        return 0;
    }
    if (self->arrays.codes == NULL) {
        return gck_done(PyErr_Format(
            PyExc_RuntimeError, "gradckpt: codec '%s' cannot hold these values, so the payload keeps the "
            "tensor itself; call decode()", self->codec->name));
    }
    *arrays = gck_arrays_again(self->arrays);
    return 0;
}

void gck_payload_count_encoded(const gck_payload *self, int by)
{
    gck_stats *s = &self->state->stats;

    s->encoded += by;
    s->codecs[gck_codec_index(self->codec)] += by;
    s->bytes_in += by * self->bytes_in;
    s->bytes_out += by * self->nbytes;
}

void gck_payload_uncount(gck_payload *self)
{
    self->state->stats.live_bytes -= self->live ? self->nbytes : 0;
    self->live = 0;
}

void gck_payload_remember(gck_payload *self)
{
    gck_payload **recent = self->state->recent;

    memmove(&recent[1], &recent[0], (GCK_NRECENT - 1) * sizeof *recent);
    recent[0] = self;
}

void gck_payload_forget(gck_payload *self)
{
    for (int i = 0; i < GCK_NRECENT; i++) {
        if (self->state->recent[i] == self) {
            self->state->recent[i] = NULL;
        }
    }
}
