/* payload.c: heap type Payload: its bytes, their codec, and the layout of the original. */
#include "engine/payload/payload.h"

#include "torch/calls.h"
#include "torch/simulated.h"
#include "torch/stream.h"
#include "torch/tensor.h"
#include "engine/payload/payload_decode.h"
#include "engine/payload/payload_overflow.h"
#include "engine/payload/payload_sizes.h"
#include "engine/payload/sharing.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* Record how far the first value lies from an aligned address of its storage.  0 or -1. */
static int find_shift(gck_payload *self, const gck_input *in)
{
    const void *storage = in->view.data;

    if ((uintptr_t)in->view.data % GCK_ALIGNMENT == 0) {    /* faster: it is aligned, as nearly all are */
        return 0;
    }
    if (gck_input_storage(&self->state->py, in, &storage) < 0) {
        return -1;
    }
    const uintptr_t past = (uintptr_t)in->view.data - (uintptr_t)storage;
    self->shift = (int)(past % GCK_ALIGNMENT / gck_itemsize(in->view.dtype));
    return 0;
}

/* Record what the original is.  No Python runs once its view is taken again.  0; 1 when no payload can
 * hold its layout; -1. */
static int describe(gck_payload *self, gck_input *in, int exact)
{
    const gck_tensor was = in->view;
    int status;

    if ((exact && find_shift(self, in) < 0)
        || (self->original = PyWeakref_NewRef(in->x, NULL)) == NULL   /* before the view: a collection may run Python */
        || gck_view_again(&self->state->py, in->x, &was, &in->view) < 0) {
        return -1;
    }
    status = gck_payload_lay_out(self, &in->view, exact);
    self->misaligned = (int)((uintptr_t)in->view.data % GCK_ALIGNMENT);
    self->requires_grad = in->requires_grad;
    self->leaf = in->leaf;
    self->has_values = gck_has_values(in->view.data);
    self->version = in->version;
    return status;
}

static void count_live(gck_payload *self)
{
    self->live = 1;
    gck_count_live(self->state, self->nbytes);
}

/* Count a use by a region, which counts as compressed until it is known to overflow. */
static void count_use(gck_payload *self)
{
    gck_state *state = self->state;

    if (self->epoch != state->epoch) {
        self->epoch = state->epoch;
        self->uses = self->fresh = 0;
    }
    self->uses++;
}

void gck_payload_again(gck_payload *self)
{
    self->again = 1;
    self->state->stats.shared++;
    count_use(self);
}

static int keeps_as_it_is(const gck_codec *codec) { return strcmp(codec->name, "raw") == 0; }

/* Make the memory for the bytes.  Only a codec that fits needs no Python tensor of them, and only
 * where no outer hook gets it.  0; 1: no place takes them, and as they are they need no payload; -1. */
static int make_bytes(gck_payload *self, int use, PyObject *place)
{
    gck_py *py = &self->state->py;
    const int ours = !self->codec->may_overflow && (use == GCK_FOR_REGION || use == GCK_FOR_USER);
    int made = place == NULL || use != GCK_FOR_REGION ? 0
             : !self->has_values ? gck_placed_take_simulated(place, self->nbytes, &self->placed)
             : gck_placed_take(self->state, place, self->nbytes, self->device, self->stream, &self->placed);

    if (made == 0 && place != NULL && use == GCK_FOR_REGION && keeps_as_it_is(self->codec)) {
        return 1;
    }
    made = made == 0 && ours ? gck_fresh_bytes(py, self->nbytes, self->device, &self->own) : made;
    if (made != 0) {
        return made > 0 ? 0 : -1;
    }
    self->arrays.codes = gck_bytes_empty(py, self->lengths.codes, self->device);
    if (self->arrays.codes != NULL && self->lengths.scales > 0) {
        self->arrays.scales = gck_bytes_empty(py, self->lengths.scales, self->device);
    }
    return self->arrays.codes != NULL && (self->lengths.scales == 0 || self->arrays.scales != NULL) ? 0 : -1;
}

/* Write the bytes, or defer that.  0; 1 when the codec overflows; -1. */
static int encode_values(gck_payload *self, const gck_input *in, gck_batch *batch)
{
    const gck_tensor values = gck_payload_values(self, NULL, NULL);
    gck_tensor view;
    gck_batch own;
    gck_how how;
    gck_bytes bytes;
    int status;

    if (self->placed.item == NULL && gck_batch_takes(batch, self->codec, &values)) {     /* faster: one launch */
        return gck_batch_add(batch, self, in->x, self->arrays, self->stream);
    }
    if (self->own.handle != NULL) {              /* faster: no references to hold */
        status = self->device >= 0 && gck_stream_used(&self->state->py, in->x, self->device) < 0 ? -1
               : gck_payload_operands(self, in->x, (gck_arrays){.codes = NULL}, &view, &bytes, &how);
        return status == 0 && self->has_values
             ? gck_run_encode(&self->state->py, self->codec, &view, &bytes, &how, 1) : status;
    }
    gck_batch_begin(&own, self->state, 0);       /* it also takes note of what a place has to be told */
    status = gck_batch_add(&own, self, in->x, self->arrays, self->stream) < 0 ? -1 : gck_batch_flush(&own);
    gck_payload_overflow_encoded(self, in->x, status);
    return status > 0 && self->overflow != NULL ? 0 : status;
}

/* self has been encoded; from here on dealloc uncounts it.  New reference: itself, or `first` when
 * that holds the same bytes; NULL with an exception. */
static gck_payload *accept(gck_payload *self, gck_payload *first)
{
    const int late = gck_counts_as_device(self->device);       /* it will tell */
    const int same = first != NULL && !late ? gck_sharing_proof(self, first) : 0;

    if (same < 0) {
        return NULL;
    }
    if (same) {
        self->state->stats.shared++;
        self = first;
    } else {
        self->counted = self->fresh = 1;
        self->epoch = self->state->epoch;
        gck_payload_count_encoded(self, 1);
        if (gck_is_placed(&self->placed) && !self->has_values) {
            gck_count_simulated_placed(self->nbytes);
        }
    }
    count_use(self);
    return (gck_payload *)Py_NewRef((PyObject *)self);
}

int gck_payload_hand_over(gck_payload *self)
{
    /* the hooks run Python */
    GCK_CLEARED_BY(gck_arrays_clear) gck_arrays arrays = gck_arrays_again(self->arrays), saved = {.codes = NULL};
    PyObject *make = self->state->py.make_saved_tensor;

    saved.codes = PyObject_CallFunctionObjArgs(make, arrays.codes, Py_False, NULL);
    if (saved.codes != NULL && arrays.scales != NULL) {
        saved.scales = PyObject_CallFunctionObjArgs(make, arrays.scales, Py_False, NULL);
    }
    if (saved.codes == NULL || (arrays.scales != NULL && saved.scales == NULL)) {
        return -1;
    }
    self->saved = gck_arrays_again(saved);
    gck_arrays_clear(&self->arrays);
    gck_payload_uncount(self);                   /* the outer hooks took the bytes */
    return 0;
}

PyObject *gck_payload_new(gck_state *state, const gck_codec *codec, gck_input *in, gck_payload *first,
                          const gck_dither *dither, int use, PyObject *place, gck_batch *batch, gck_skip_reason *skip)
{
    const int exact = use != GCK_FOR_USER && (!(use & GCK_WITHOUT_HOLES) || codec->max_error == 0);
    GCK_SCOPED gck_payload *self = NULL, *result = NULL;
    int status, dense = 0;

    use &= ~GCK_WITHOUT_HOLES;
    *skip = GCK_COMPRESS;
    gck_payload_overflow_poll(state);
    if (first != NULL && use == GCK_FOR_REGION && (status = gck_sharing_holds(first, in)) != 0) {
        if (status > 0) {
            state->stats.shared++;
            count_use(first);
        }
        return status < 0 ? NULL : Py_NewRef((PyObject *)first);
    }
    self = (gck_payload *)PyType_GenericAlloc(state->Payload, 0);
    if (self == NULL) {
        return NULL;
    }
    self->state = state;
    self->codec = codec;
    self->stochastic = dither != NULL || (first != NULL && first->stochastic);
    if (self->stochastic) {
        self->dither = first != NULL ? first->dither : *dither;
    }
    first = first != NULL && gck_payload_has_bytes(first) ? first : NULL;
    status = describe(self, in, exact);
    dense = status == 0 && !gck_payload_room(self, &in->view, use == GCK_FOR_USER);
    if (status != 0 || dense) {
        *skip = status > 0 ? GCK_SKIP_LAYOUT : dense ? GCK_SKIP_DENSE : GCK_COMPRESS;
        return NULL;
    }
    status = place != NULL && batch != NULL && batch->n >= gck_place_most_unwritten(place) ? gck_batch_flush(batch) : 0;
    status = status < 0 ? -1 : make_bytes(self, use, place);
    if (status != 0) {
        *skip = status > 0 ? GCK_SKIP_PLACE : GCK_COMPRESS;
        return NULL;
    }
    if (gck_payload_overflow_begin(self) < 0) {
        *skip = GCK_SKIP_FLAG;                   /* the overflow would not be reported: keep the original */
        return NULL;
    }
    status = encode_values(self, in, first == NULL ? batch : NULL);
    if (status != 0) {
        *skip = status > 0 ? GCK_SKIP_OVERFLOW : GCK_COMPRESS;
        return NULL;
    }
    if (use == GCK_FOR_USER) {
        return Py_NewRef((PyObject *)self);
    }
    if (!gck_is_placed(&self->placed)) {
        count_live(self);
    }
    if ((result = accept(self, first)) != self) {
        return Py_XNewRef((PyObject *)result);
    }
    if ((use == GCK_FOR_REGION_SAVED && gck_payload_hand_over(self) < 0)
        || (use == GCK_FOR_REGION && first != NULL && gck_counts_as_device(self->device)
            && gck_payload_overflow_ask(self, first) < 0)) {
        return NULL;
    }
    if (use == GCK_FOR_REGION && self->version >= 0 && self->twin == NULL
        && !gck_stream_is_captured(self->device, self->stream)) {           /* else each replay changes its bytes */
        gck_payload_remember(self);
    }
    return self->overflow != NULL && gck_payload_overflow_bound(self) < 0 ? NULL : Py_NewRef((PyObject *)self);
}

int gck_payload_adopt(gck_payload *self, PyObject *x)
{
    GCK_SCOPED PyObject *original = PyWeakref_NewRef(x, NULL), *old = NULL;

    if (original == NULL) {
        return -1;
    }
    old = self->original;
    self->original = gck_give(&original);
    return 0;
}

/* ---- the Python type ---- */

static void payload_dealloc(PyObject *op)
{
    gck_payload *self = (gck_payload *)op;

    /* First, because clearing weak references runs Python, which must not find the payload
     * there. */
    gck_payload_overflow_forget(self);
    gck_payload_forget(self);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    gck_payload_uncount(self);
    if (self->sizes != self->few) {
        free(self->sizes);
    }
    gck_fresh_free(&self->own);
    gck_placed_drop(&self->placed);
    gck_arrays_clear(&self->arrays);
    gck_arrays_clear(&self->saved);
    Py_XDECREF(self->original);
    Py_XDECREF(self->kept);
    Py_XDECREF((PyObject *)self->twin);
    gck_object_free(op);
}

static PyObject *payload_decode_method(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return gck_payload_decode((gck_payload *)op);
}

static PyObject *payload_codec(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(((gck_payload *)op)->codec->name);
}

/* closure: not NULL for the second. */
static PyObject *payload_array(PyObject *op, void *closure)
{
    gck_payload *self = (gck_payload *)op;
    gck_arrays arrays;

    if (gck_payload_arrays(self, &arrays) < 0) {
        return NULL;
    }
    Py_XDECREF(closure != NULL ? arrays.codes : arrays.scales);
    return closure == NULL ? arrays.codes
         : arrays.scales != NULL ? arrays.scales : gck_bytes_empty(&self->state->py, 0, self->device);
}

static PyObject *payload_shape(PyObject *op, void *Py_UNUSED(closure))
{
    gck_payload *self = (gck_payload *)op;

    return PyObject_CallFunction(self->state->py.size, "(N)", gck_sizes(self->ndim, self->sizes));
}

static PyObject *payload_dtype(PyObject *op, void *Py_UNUSED(closure))
{
    return Py_NewRef(gck_dtype_object(&((gck_payload *)op)->state->py, ((gck_payload *)op)->dtype));
}

static PyObject *payload_device(PyObject *op, void *Py_UNUSED(closure))
{
    return gck_device_object(&((gck_payload *)op)->state->py, ((gck_payload *)op)->device);
}

static PyObject *payload_repr(PyObject *op)
{
    const gck_payload *self = (gck_payload *)op;

    return PyObject_CallFunction(self->state->py.call.payload_repr, "OL", op, (long long)self->bytes_in);
}

static PyMemberDef payload_members[] = {
    {"nbytes", T_LONGLONG, offsetof(gck_payload, nbytes), READONLY, "Size of the payload in bytes, scales included."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(gck_payload, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef payload_getset[] = {
    {"codec", payload_codec, NULL, "Name of the codec.", NULL},
    {"shape", payload_shape, NULL, "Shape of the original.", NULL},
    {"dtype", payload_dtype, NULL, "Dtype of the original.", NULL},
    {"device", payload_device, NULL, "Device of the original.", NULL},
    {"codes", payload_array, NULL, "Its first array: a uint8 tensor (docs/codecs.md describes it). Not a copy.", NULL},
    {"scales", payload_array, NULL, "Its second array, uint8, which is small; empty: the codec has none. Not a copy.",
     "scales"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef payload_methods[] = {
    {"decode", payload_decode_method, METH_NOARGS,
     "decode($self, /)\n--\n\n"
     "Return a new tensor of the original's shape, dtype, strides and device. It does not require grad."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot payload_slots[] = {
    {Py_tp_dealloc, payload_dealloc},
    {Py_tp_repr, payload_repr},
    {Py_tp_members, payload_members},
    {Py_tp_getset, payload_getset},
    {Py_tp_methods, payload_methods},
    {Py_tp_doc, "An encoded tensor, made by gradckpt.codecs.encode()."},
    {0, NULL},
};

PyType_Spec gck_payload_spec = {
    .name = "gradckpt.codecs.Payload",
    .basicsize = sizeof(gck_payload),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = payload_slots,
};
