/* payload_decode.c: the tensor that a payload gives back. */
#include "engine/payload/payload_decode.h"

#include "torch/abi.h"
#include "torch/calls.h"
#include "torch/device.h"
#include "torch/input.h"
#include "torch/stream.h"
#include "torch/tensor.h"
#include "engine/payload/payload_overflow.h"

/* Is it read on another stream than the one that wrote it? */
static int crosses_streams(const gck_payload *self, const void *stream)
{
    return self->device >= 0 && stream != self->stream;
}

/* Tell the allocator where x is read; else it knows. */
static int cross_stream(gck_payload *self, PyObject *x, const gck_tensor *out)
{
    return crosses_streams(self, out->stream) ? gck_stream_used(&self->state->py, x, self->device) : 0;
}

/* Outer hooks may have returned a slice of their own memory: then copy it.  0 or -1. */
static int align(PyObject **array, const void *data, uintptr_t to)
{
    if (*array == NULL || (uintptr_t)data % to == 0) {
        return 0;
    }
    GCK_SCOPED PyObject *slice = *array;
    *array = PyObject_CallMethod(slice, "clone", NULL);
    return *array != NULL ? 0 : -1;
}

/* Have the bytes where a place brings them.  1; 0: they are at none, or it has no room; -1. */
static int bring(gck_payload *self, const gck_tensor *view, gck_batch *batch, gck_arrays *arrays)
{
    int brought = gck_payload_bring(self, view->stream, arrays);

    if (brought == 0 && gck_is_placed(&self->placed) && batch != NULL && batch->n > 0) {    /* it may give some */
        brought = gck_batch_flush(batch) < 0 ? -1 : gck_payload_bring(self, view->stream, arrays);
    }
    return brought;
}

/* Decode the bytes into out, whose view this is.  0 or -1. */
static int decode_bytes(gck_payload *self, PyObject *out, const gck_tensor *view, gck_batch *batch)
{
    GCK_CLEARED_BY(gck_arrays_clear) gck_arrays arrays = {.codes = NULL};
    gck_payload *of = self->merged ? self->twin : self;
    gck_batch own;
    gck_bytes bytes;
    const int brought = bring(of, view, batch, &arrays);
    const int named = !brought && (self->own.handle == NULL || crosses_streams(self, view->stream));    /* as tensors */
    int status = brought < 0 || (named && gck_payload_arrays(self, &arrays) < 0)
               ? -1 : gck_payload_view(self, arrays, &bytes);

    gck_batch_begin(&own, self->state, 1);
    if (status == 0 && arrays.codes != NULL) {
        status = align(&arrays.codes, bytes.codes, GCK_PAYLOAD_ALIGNMENT) < 0
              || align(&arrays.scales, bytes.scales, GCK_SCALES_ALIGNMENT) < 0
              || cross_stream(self, arrays.codes, view) < 0
              || (arrays.scales != NULL && cross_stream(self, arrays.scales, view) < 0) ? -1 : 0;
    }
    if (status == 0) {
        const gck_tensor values = self->once != NULL ? gck_payload_values(self, NULL, NULL) : *view;
        const int waits = gck_batch_takes(batch, self->codec, &values) && of->placed.item == NULL;
        status = gck_batch_add(waits ? batch : &own, brought ? of : self, out, arrays, view->stream) < 0
               ? -1 : gck_batch_flush(&own);
    }
    return status;
}

/* Copy the values of the original, all of them or those that decoded to NaN, each once. 0 or -1. */
static int copy_original(gck_payload *self, PyObject *original, int only_nan, PyObject *out, const gck_tensor *view)
{
    const gck_tensor values = gck_payload_values(self, NULL, NULL);
    GCK_SCOPED PyObject *once = self->once == NULL ? Py_NewRef(Py_None)
        : values.steps == NULL ? Py_BuildValue("(NO)", gck_sizes(1, values.sizes), Py_None)
        : Py_BuildValue("(NN)", gck_sizes(values.ndim, values.sizes), gck_sizes(values.ndim, values.steps));

    return once == NULL || cross_stream(self, original, view) < 0
        ? -1 : gck_done(PyObject_CallFunction(self->state->py.call.copy_original, "OOiO", out, original,
                                              only_nan, once));
}

/* Decode a payload that has its bytes itself: nothing runs Python before its values are there.  1 and
 * *out, NULL with an exception; 0: it takes torch.empty, or its memory has to be marked as used on this stream. */
static int decode_fresh(gck_payload *self, PyObject **out)
{
    gck_py *py = &self->state->py;
    const int64_t *strides = self->layout != GCK_LAYOUT_PLAIN ? self->sizes + self->ndim : NULL;
    gck_fresh fresh = {.handle = NULL};
    void *stream = NULL;
    int made;

    *out = NULL;
    if (self->device >= 0 && gck_stream_of(py->dlpack, self->device, &stream) != 0) {
        gck_stream_unknown();
        return 1;
    }
    made = crosses_streams(self, stream)
         ? 0 : gck_fresh_tensor(py, self->ndim, self->sizes, strides, self->dtype, self->device, &fresh);
    if (made > 0) {
        const gck_tensor view = gck_payload_values(self, fresh.data, stream);
        const gck_bytes bytes = gck_in_one(self->own.data, self->lengths);
        if (gck_run_decode(py, self->codec, &bytes, &view, 1) == 0) {
            *out = gck_fresh_object(py, &fresh);
        }
        gck_fresh_free(&fresh);
    }
    return made != 0;
}

/* *original: new reference to the tensor that was encoded, where the batch asks for its values and they
 * are still there; else NULL.  0 or -1. */
static int find_unchanged(const gck_payload *self, const gck_batch *batch, PyObject **original)
{
    int64_t now = -1;

    *original = NULL;
    if (batch == NULL || !batch->exact || self->version < 0 || PyWeakref_GetObject(self->original) == Py_None) {
        return 0;
    }
    *original = Py_NewRef(PyWeakref_GetObject(self->original));
    if (gck_version_of(&self->state->py, *original, &now) < 0 || now != self->version) {
        Py_CLEAR(*original);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* New reference.  into: what to decode into, at once, since slices may share values; or NULL. */
static PyObject *decode(gck_payload *self, PyObject *into, gck_batch *batch)
{
    gck_state *state = self->state;
    GCK_SCOPED PyObject *out = NULL, *original = NULL;
    gck_tensor view;

    if (batch == NULL && into == NULL && self->own.handle != NULL && self->has_values && !self->unwritten
        && self->shift == 0 && decode_fresh(self, &out)) {
        return gck_give(&out);
    }
    if (find_unchanged(self, batch, &original) < 0) {
        return NULL;
    }
    const int all = original != NULL || self->codec->max_error == 0 || self->codec->counted != NULL;
    if (original == NULL && gck_payload_overflow_original(self, &original) < 0) {
        return NULL;
    }
    out = into != NULL ? Py_NewRef(into) : gck_payload_memory(self);
    const int reason = out == NULL ? -1 : gck_view_of(&state->py, out, &view);
    if (reason > 0) {
        return PyErr_Format(PyExc_RuntimeError, "gradckpt: torch.empty did not return a plain tensor; enter no mode in "
                                                "backward that was not active in forward");
    }
    return reason < 0
        || ((original == NULL || !all)
            && decode_bytes(self, out, &view, original == NULL && into == NULL ? batch : NULL) < 0)
        || (original != NULL && copy_original(self, original, !all, out, &view) < 0) ? NULL : gck_give(&out);
}

PyObject *gck_payload_decode(gck_payload *self) { return decode(self, NULL, NULL); }

PyObject *gck_payload_revive(gck_payload *self, PyObject *into, gck_batch *batch)
{
    gck_state *state = self->state;
    PyObject *out = decode(self, into, batch);

    if (out == NULL) {
        return NULL;
    }
    state->rounding.restored = 1;
    state->restores++;
    if (self->kept == NULL && (batch == NULL || !batch->exact) && PyWeakref_GetObject(self->original) != Py_None) {
        state->stats.originals_alive++;
        state->stats.originals_alive_bytes += self->bytes_in;
    }
    return out;
}

/* New reference: an alias of x, which requires grad, that is no leaf and no view.  The original was no
 * leaf: a region may change such an input in place, and an inner region compresses it again.  Without
 * grad mode, in which the alias would have an edge to x: hooks would take x for a leaf that is used. */
static PyObject *as_non_leaf(const gck_py *py, PyObject *x)
{
    const bool grad = gck_torch.aoti_torch_grad_mode_is_enabled();
    PyObject *alias;

    gck_torch.aoti_torch_grad_mode_set_enabled(false);
    alias = PyObject_CallFunctionObjArgs(py->as_non_leaf, x, NULL);
    gck_torch.aoti_torch_grad_mode_set_enabled(grad);
    return alias;
}

PyObject *gck_payload_restore(gck_payload *self, PyObject *into, gck_batch *batch)
{
    gck_state *state = self->state;
    GCK_SCOPED PyObject *out = gck_payload_revive(self, into, batch), *leaf = NULL;

    if (out == NULL || !self->requires_grad) {
        return gck_give(&out);
    }
    leaf = PyObject_CallMethodObjArgs(out, state->py.names.requires_grad_, NULL);
    return leaf == NULL || self->leaf ? gck_give(&leaf) : as_non_leaf(&state->py, out);
}
