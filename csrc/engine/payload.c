/* payload.c: heap type Payload: one buffer of bytes, its codec, and what the original
 * looked like. */
#include "payload.h"

#include "pending.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* The memory of a payload's bytes.  Outer saved-tensor hooks may have given us this
 * tensor, so it is looked at: a wrong one would be read out of bounds, or as nonsense. */
static int view_bytes(gck_payload *self, PyObject *buffer, int64_t nbytes, void **data)
{
    gck_dl_tensor dl;

    if (self->state->py.dlpack->dltensor_from_py_object_no_sync(buffer, &dl) != 0) {
        return -1;
    }
    if (dl.dtype.code != GCK_DL_UINT || dl.dtype.bits != 8 || dl.ndim != 1 || dl.shape[0] != nbytes
        || (dl.strides != NULL && nbytes > 1 && dl.strides[0] != 1)
        || (dl.device.device_type == GCK_DL_CUDA ? dl.device.device_id : -1) != self->device_index) {
        PyErr_Format(PyExc_RuntimeError, "gradckpt: an outer saved-tensor hook returned another tensor (%R) for a "
                     "payload of %lld uint8 bytes on %S; such hooks must return what they were given",
                     Py_TYPE(buffer), (long long)nbytes, self->device);
        return -1;
    }
    *data = (char *)dl.data + dl.byte_offset;
    return 0;
}

int gck_is_dense(const gck_tensor *x)
{
    int64_t expected = 1;
    uint64_t used = 0;

    for (int found = 0; found < x->ndim; found++) {
        int next = -1;
        for (int d = 0; d < x->ndim; d++) {
            if (!(used >> d & 1) && (next < 0 || x->strides[d] < x->strides[next]
                                     || (x->strides[d] == x->strides[next] && x->sizes[d] < x->sizes[next]))) {
                next = d;
            }
        }
        used |= (uint64_t)1 << next;
        if (x->sizes[next] != 1) {
            if (x->strides[next] != expected) {
                return 0;
            }
            expected *= x->sizes[next];
        }
    }
    return 1;
}

static int describe(gck_payload *self, PyObject *x, const gck_tensor *view)
{
    const gck_py *py = &self->state->py;

    self->ndim = view->ndim;
    self->sizes = malloc(sizeof(int64_t) * (size_t)(2 * view->ndim + 1));
    if (self->sizes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->strided = view->strides != NULL && view->ndim <= GCK_MAX_DIM && gck_is_dense(view);
    for (int d = 0; d < view->ndim; d++) {
        self->sizes[d] = view->sizes[d];
        self->sizes[view->ndim + d] = self->strided ? view->strides[d] : 0;
    }
    self->device_index = view->device;
    self->stream = view->stream;
    self->data = view->data;
    if ((self->dtype = PyObject_GetAttr(x, py->names.dtype)) == NULL
        || (self->device = PyObject_GetAttr(x, py->names.device)) == NULL
        || (self->shape = PyObject_GetAttr(x, py->names.shape)) == NULL
        || (self->requires_grad = gck_attr_is_true(x, py->names.requires_grad)) < 0
        || (self->leaf = gck_attr_is_true(x, py->names.is_leaf)) < 0
        || (self->original = PyWeakref_NewRef(x, NULL)) == NULL) {
        return -1;
    }
    self->version = PyObject_GetAttr(x, py->names._version);
    if (self->version == NULL) {
        PyErr_Clear();
    }
    return 0;
}

static int64_t itemsize(gck_dtype dtype) { return dtype == GCK_F32 ? 4 : dtype == GCK_BOOL ? 1 : 2; }

void gck_count_live(gck_state *state, int64_t nbytes)
{
    gck_stats *s = &state->stats;

    s->live_bytes += nbytes;
    s->peak_live_bytes = s->live_bytes > s->peak_live_bytes ? s->live_bytes : s->peak_live_bytes;
}

static void count_encoded(gck_state *state, const gck_payload *self)
{
    gck_stats *s = &state->stats;

    s->encoded++;
    s->bytes_in += self->bytes_in;
    s->bytes_out += self->nbytes;
    gck_count_live(state, self->nbytes);
}

/* A region uses it, which counts as compressed until the contrary is known. */
static void count_use(gck_state *state, gck_payload *self)
{
    if (self->epoch != state->epoch) {
        self->epoch = state->epoch;
        self->uses = self->fresh = 0;
    }
    self->uses++;
}

static void remember(gck_state *state, gck_payload *self)
{
    for (int i = GCK_NRECENT - 1; i > 0; i--) {
        state->recent[i] = state->recent[i - 1];
    }
    state->recent[0] = self;
}

void gck_payload_wait(gck_payload *self, const gck_batch *batch) { self->waits = batch; }

static void forget(gck_payload *self)
{
    for (int i = 0; i < GCK_NRECENT; i++) {
        if (self->state->recent[i] == self) {
            self->state->recent[i] = NULL;
        }
    }
}

void gck_payload_arrived(gck_payload *self, int done)
{
    self->waits = NULL;
    if (!done) {
        forget(self);
    }
}

/* Writes the bytes, or lets that wait.  0; 1 when the codec cannot hold the values; -1. */
static int fill(gck_payload *self, PyObject *x, const gck_tensor *view, gck_batch *batch, void *bytes, gck_how *how)
{
    int status;

    if (gck_batch_takes(batch, self->codec, view)) {
        return gck_batch_add(batch, self->codec, x, view, (PyObject *)self, bytes, how->dither);
    }
    status = gck_run_encode(&self->state->py, self->codec, view, &bytes, how, 1);
    gck_pending_encoded(self, x, status);
    return status > 0 && self->verdict != NULL ? 0 : status;
}

PyObject *gck_payload_new(gck_state *state, const gck_codec *codec, PyObject *x, const gck_tensor *view,
                          const gck_dither *dither, gck_payload_use use, gck_batch *batch, int *fits)
{
    gck_payload *self = PyObject_New(gck_payload, state->Payload);
    const gck_py *py = &state->py;
    gck_how how = {dither, NULL};
    void *bytes;
    int ok = 0, status;

    *fits = 1;
    gck_pending_poll(state);
    if (self == NULL) {
        return NULL;
    }
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->state = state;
    self->codec = codec;
    self->stochastic = dither != NULL;
    self->bytes_in = view->numel * itemsize(view->dtype);
    if (describe(self, x, view) < 0) {
        goto exit;
    }
    const int64_t nbytes = gck_nbytes(codec, view->numel, view->dtype);
    self->buffer = gck_bytes_empty(py, nbytes, self->device, view->device < 0);
    if (self->buffer == NULL || view_bytes(self, self->buffer, nbytes, &bytes) < 0) {
        goto exit;
    }
    if (gck_pending_begin(self, view, &how) < 0 && use != GCK_FOR_USER) {
        *fits = 0;                               /* nobody would say: keep it as it is */
        goto exit;
    }
    status = fill(self, x, view, batch, bytes, &how);
    if (status != 0) {
        *fits = status < 0;
        goto exit;
    }
    self->nbytes = nbytes;
    if (use != GCK_FOR_USER) {
        self->counted = 1;                       /* from here on dealloc takes it off */
        count_encoded(state, self);
        count_use(state, self);
        self->fresh = 1;
    }
    if (use == GCK_FOR_REGION_SAVED) {
        self->saved = PyObject_CallFunctionObjArgs(py->make_saved_tensor, self->buffer, Py_False, NULL);
        if (self->saved == NULL) {
            goto exit;
        }
        Py_CLEAR(self->buffer);
    } else if (use == GCK_FOR_REGION && self->version != NULL) {
        remember(state, self);
    }
    ok = 1;

exit:
    if (!ok) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* Same memory, seen in the same way. */
static int same_view(const gck_payload *p, const gck_tensor *view)
{
    if (p->data != view->data || p->ndim != view->ndim || p->strided != (view->strides != NULL && gck_is_dense(view))) {
        return 0;
    }
    for (int d = 0; d < p->ndim; d++) {
        if (p->sizes[d] != view->sizes[d] || (p->strided && p->sizes[p->ndim + d] != view->strides[d])) {
            return 0;
        }
    }
    return 1;
}

PyObject *gck_payload_find(gck_state *state, const gck_codec *codec, PyObject *x, const gck_tensor *view,
                           int stochastic, const gck_batch *batch)
{
    PyObject *version = NULL;
    gck_payload *found = NULL;
    int requires_grad = 0;

    for (int i = 0; i < GCK_NRECENT && found == NULL; i++) {
        gck_payload *p = state->recent[i];
        if (p == NULL || p->codec != codec || p->stochastic != stochastic || (p->waits != NULL && p->waits != batch)
            || PyWeakref_GetObject(p->original) != x || !same_view(p, view)) {
            continue;                            /* a dead original gives None: no match */
        }
        if (version == NULL
            && ((version = PyObject_GetAttr(x, state->py.names._version)) == NULL
                || (requires_grad = gck_attr_is_true(x, state->py.names.requires_grad)) < 0)) {
            Py_XDECREF(version);
            return NULL;
        }
        if (requires_grad != p->requires_grad) {
            continue;
        }
        found = PyObject_RichCompareBool(version, p->version, Py_EQ) == 1 ? p : NULL;
    }
    Py_XDECREF(version);
    if (found != NULL) {
        count_use(state, found);
    }
    return Py_XNewRef((PyObject *)found);
}

int gck_payload_adopt(gck_payload *self, PyObject *x)
{
    PyObject *old = self->original, *original = PyWeakref_NewRef(x, NULL);

    if (original == NULL) {
        return -1;
    }
    self->original = original;
    Py_DECREF(old);
    self->requires_grad = gck_attr_is_true(x, self->state->py.names.requires_grad);
    self->leaf = 0;
    return self->requires_grad < 0 ? -1 : 0;
}

/* The buffer, new reference; through the outer hooks when those have it. */
static PyObject *payload_bytes(gck_payload *self)
{
    if (self->saved == NULL && self->buffer == NULL) {
        return PyErr_Format(PyExc_RuntimeError, "gradckpt: codec '%s' cannot hold these values; the payload keeps the "
                            "tensor itself, and has no bytes", self->codec->name);
    }
    return self->saved != NULL ? PyObject_CallMethodObjArgs(self->saved, self->state->py.names.unpack, NULL)
                               : Py_NewRef(self->buffer);
}

/* Bytes written on another stream than the one that reads them: tell the allocator. */
static int cross_stream(gck_payload *self, PyObject *buffer, const gck_tensor *out)
{
    PyObject *result;

    if (self->device_index < 0 || out->stream == self->stream) {
        return 0;
    }
    result = PyObject_CallMethod(self->state->py.shim, "record_stream", "OO", buffer, self->device);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* The values of the bytes into out, whose view this is.  0 or -1. */
static int decode_bytes(gck_payload *self, PyObject *out, const gck_tensor *view, gck_batch *batch)
{
    PyObject *buffer = payload_bytes(self);
    void *bytes;
    int status = -1;

    if (buffer != NULL && view_bytes(self, buffer, self->nbytes, &bytes) == 0 && cross_stream(self, buffer, view) == 0) {
        if (gck_batch_takes(batch, self->codec, view)) {
            status = gck_batch_add(batch, self->codec, out, view, buffer, bytes, NULL);
        } else {
            status = gck_run_decode(&self->state->py, self->codec, (const void *const *)&bytes, view, 1);
        }
    }
    Py_XDECREF(buffer);
    return status;
}

/* The values of the original, all of them or those that decoded to NaN.  0 or -1. */
static int fill_from(gck_payload *self, PyObject *original, PyObject *out, const gck_tensor *view)
{
    PyObject *filled;

    if (cross_stream(self, original, view) < 0) {
        return -1;
    }
    filled = PyObject_CallMethod(self->state->py.shim, "fill_from", "OOi", out, original, self->codec->max_error > 0);
    Py_XDECREF(filled);
    return filled == NULL ? -1 : 0;
}

static PyObject *decode(gck_payload *self, gck_batch *batch)
{
    gck_state *state = self->state;
    const uint32_t any = (1u << GCK_NDTYPES) - 1;
    PyObject *out, *original;
    gck_tensor view;
    int ok = 0;

    if (gck_pending_original(self, &original) < 0) {
        return NULL;
    }
    out = gck_empty(&state->py, self->ndim, self->sizes, self->strided ? self->sizes + self->ndim : NULL,
                    self->dtype, self->device);
    if (out == NULL) {
        goto exit;
    }
    if (gck_tensor_view(&state->py, out, any, &view) != GCK_COMPRESS) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError, "gradckpt: torch.empty did not give a plain tensor; is a mode active "
                                                "in backward that was not active in forward?");
        }
        goto exit;
    }
    batch = original == NULL ? batch : NULL;
    ok = (original != NULL && self->codec->max_error == 0) || decode_bytes(self, out, &view, batch) == 0;
    ok = ok && (original == NULL || fill_from(self, original, out, &view) == 0);

exit:
    Py_XDECREF(original);
    if (!ok) {
        Py_CLEAR(out);
    }
    return out;
}

PyObject *gck_payload_decode(gck_payload *self) { return decode(self, NULL); }

/* Decoded, and counted as a restore. */
static PyObject *revive(gck_payload *self, gck_batch *batch)
{
    gck_state *state = self->state;
    PyObject *out = decode(self, batch);

    if (out == NULL) {
        return NULL;
    }
    state->rounding.restored = 1;
    if (self->kept == NULL && PyWeakref_GetObject(self->original) != Py_None) {
        state->stats.originals_alive++;
        state->stats.originals_alive_bytes += self->bytes_in;
    }
    return out;
}

PyObject *gck_payload_revive(gck_payload *self) { return revive(self, NULL); }

PyObject *gck_payload_restore(gck_payload *self, gck_batch *batch)
{
    gck_state *state = self->state;
    PyObject *out = revive(self, batch);
    PyObject *result;

    if (out == NULL || !self->requires_grad) {
        return out;
    }
    result = PyObject_CallMethodObjArgs(out, state->py.names.requires_grad_, NULL);
    if (result != NULL && !self->leaf) {
        /* The original was no leaf: a region may change such an input in place, and an inner
         * region compresses it again.  The alias shares storage and is no view. */
        Py_DECREF(result);
        result = PyObject_CallFunctionObjArgs(state->py.as_non_leaf, out, NULL);
    }
    Py_DECREF(out);
    return result;
}

/* ---- the Python type ---- */

static void payload_dealloc(PyObject *op)
{
    gck_payload *self = (gck_payload *)op;
    PyTypeObject *type = Py_TYPE(op);

    /* First: clearing weak references runs Python, which must not find us there. */
    gck_pending_forget(self);
    forget(self);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    self->state->stats.live_bytes -= self->counted ? self->nbytes : 0;
    free(self->sizes);
    Py_XDECREF(self->buffer);
    Py_XDECREF(self->saved);
    Py_XDECREF(self->dtype);
    Py_XDECREF(self->device);
    Py_XDECREF(self->shape);
    Py_XDECREF(self->original);
    Py_XDECREF(self->version);
    Py_XDECREF(self->kept);
    PyObject_Free(op);
    Py_DECREF(type);
}

static PyObject *payload_decode_method(PyObject *op, PyObject *unused)
{
    (void)unused;
    return gck_payload_decode((gck_payload *)op);
}

static PyObject *payload_codec(PyObject *op, void *closure)
{
    (void)closure;
    return PyUnicode_FromString(((gck_payload *)op)->codec->name);
}

static PyObject *payload_data(PyObject *op, void *closure)
{
    (void)closure;
    return payload_bytes((gck_payload *)op);
}

static PyObject *payload_repr(PyObject *op)
{
    gck_payload *self = (gck_payload *)op;

    return PyUnicode_FromFormat("<gradckpt.Payload %s of %S %S, %lld -> %lld bytes>", self->codec->name, self->dtype,
                                self->shape, (long long)self->bytes_in, (long long)self->nbytes);
}

static PyMemberDef payload_members[] = {
    {"nbytes", T_LONGLONG, offsetof(gck_payload, nbytes), READONLY, "Size of the payload in bytes, scales included."},
    {"shape", T_OBJECT_EX, offsetof(gck_payload, shape), READONLY, "Shape of the original."},
    {"dtype", T_OBJECT_EX, offsetof(gck_payload, dtype), READONLY, "Dtype of the original."},
    {"device", T_OBJECT_EX, offsetof(gck_payload, device), READONLY, "Device of the original."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(gck_payload, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef payload_getset[] = {
    {"codec", payload_codec, NULL, "Name of the codec.", NULL},
    {"data", payload_data, NULL, "The bytes: a uint8 tensor (docs/codecs.md describes them). Not a copy.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef payload_methods[] = {
    {"decode", payload_decode_method, METH_NOARGS,
     "decode($self, /)\n--\n\nA fresh tensor of the original's shape, dtype, strides and device; it does not require grad."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot payload_slots[] = {
    {Py_tp_dealloc, payload_dealloc},
    {Py_tp_repr, payload_repr},
    {Py_tp_members, payload_members},
    {Py_tp_getset, payload_getset},
    {Py_tp_methods, payload_methods},
    {Py_tp_doc, "One encoded tensor; made by gradckpt.encode()."},
    {0, NULL},
};

PyType_Spec gck_payload_spec = {
    .name = "gradckpt.Payload",
    .basicsize = sizeof(gck_payload),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = payload_slots,
};
