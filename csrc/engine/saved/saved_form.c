/* saved_form.c: keeps a saved tensor in a form that suffices for the node which saves it. */
#include "engine/saved/saved_form.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/rounding.h"
#include "engine/state.h"
#include "engine/payload/layout.h"
#include "engine/payload/payload.h"
#include "engine/payload/payload_bytes.h"
#include "engine/payload/sharing.h"

/* ---- what is kept as it is ---- */

/* Make the hooks around ours the innermost.  0 or -1. */
static int push_outer(const gck_saved_hooks *self)
{
    return gck_done(PyObject_CallFunctionObjArgs(self->packing.state->py.push_hooks, self->outer_pack,
                                                 self->outer_unpack, NULL));
}

/* Keep it by reference, checked against its version at unpack, without its graph.  0 or -1. */
static int keep(const gck_saved_hooks *self, const gck_input *in, gck_saved_form *to)
{
    PyObject *x = in->leaf ? Py_NewRef(in->x)
                           : PyObject_CallMethodObjArgs(in->x, self->packing.state->py.names.detach, NULL);
    GCK_CLEARED_BY(gck_input_clear) gck_input plain = {.x = x};
    return x == NULL ? -1 : gck_pack_exactly(&self->packing, &plain, &to->entry);
}

/* ---- what becomes a payload ---- */

/* Find x in the memory of a base; *offset in values.  1 when it lies there as a whole. */
static int lies_within(const gck_tensor *x, const gck_tensor *base, int64_t *offset)
{
    const int itemsize = gck_itemsize(x->dtype);
    const intptr_t distance = (intptr_t)x->data - (intptr_t)base->data;
    int64_t last = *offset = distance / itemsize;

    for (int d = 0; d < x->ndim && x->strides != NULL; d++) {
        last += (x->sizes[d] - 1) * x->strides[d];       /* torch has no negative strides */
    }
    last += x->strides == NULL ? x->numel - 1 : 0;
    return x->dtype == base->dtype && distance >= 0 && distance % itemsize == 0 && last < base->numel;
}

/* Find or make a payload of the tensor.  1; 0 when the codec cannot: *why; -1.
 * only_found: 0 also when none exists yet. */
static int encode(const gck_saved_hooks *self, const gck_codec *codec, gck_input *in, int only_found,
                  gck_saved_form *to, int *why, gck_batch *batch)
{
    gck_state *state = self->packing.state;
    const gck_plan *plan = &self->packing.plan;
    const int stochastic = plan->stochastic && codec == plan->codec, outer = self->packing.outer;
    const int late = only_found && in->view.device >= 0;       /* a device proves it when it is too late */
    GCK_SCOPED gck_payload *first = outer || late ? NULL
                                  : gck_sharing_find(state, codec, in, stochastic, codec->max_error == 0, batch);
    GCK_SCOPED PyObject *payload = NULL;
    gck_dither dither;
    gck_skip_reason skip = GCK_SKIP_OVERFLOW;
    int done = -1;

    if (first == NULL && (only_found || PyErr_Occurred())) {
        return PyErr_Occurred() ? -1 : 0;
    }
    GCK_CLEARED_BY(gck_input_clear) gck_input own = *in;
    /* A device may report overflow late, and until then the payload holds its original.  That must
     * not be a tensor whose node holds the payload. */
    own.x = codec->may_overflow ? PyObject_CallMethodObjArgs(in->x, state->py.names.detach, NULL) : Py_NewRef(in->x);
    if (own.x != NULL) {
        payload = gck_payload_new(state, codec, &own, first,
                                  stochastic ? gck_next_dither(state, plan, 0, &dither) : NULL,
                                  (outer ? GCK_FOR_REGION_SAVED : GCK_FOR_REGION) | GCK_WITHOUT_HOLES, plan->place,
                                  outer || in->view.device < 0 ? NULL : batch, &skip);
    }
    if (payload == NULL) {
        done = PyErr_Occurred() ? -1 : 0;
        *why = skip;
    } else if (only_found && payload != (PyObject *)first) {
        done = 0;                                /* it was written to since, and costs more than a part of it */
    } else if (own.x == in->x || gck_payload_adopt((gck_payload *)payload, in->x) == 0) {
        to->entry = (gck_packed){GCK_PACKED_PAYLOAD, Py_NewRef(payload), 0, 0, NULL, 0};
        done = 1;
    }
    return done;
}

/* 1 when a restored payload of x has the strides of x. */
static int keeps_strides(const gck_tensor *x)
{
    return x->strides == NULL || gck_is_dense(x);
}

/* Keep the tensor by a payload of the whole tensor of which it is a view, where that costs no more
 * than its own, so that all views share one payload.  1, 0, -1 as above. */
static int encode_view(const gck_saved_hooks *self, const gck_codec *codec, gck_input *in, gck_saved_form *to,
                       int *why, gck_batch *batch)
{
    gck_py *py = &self->packing.state->py;
    /* Hooks around ours may run this again on a tensor that is no view: each has its own bytes. */
    GCK_CLEARED_BY(gck_input_clear)
    gck_input whole = {.x = self->packing.outer ? Py_NewRef(Py_None) : PyObject_GetAttr(in->x, py->names._base)};
    gck_tensor view;
    int64_t offset;
    int done = 0, reason = whole.x == NULL ? -1 : GCK_SKIP_LAYOUT;

    if (whole.x != NULL && whole.x != Py_None) {
        reason = gck_input_read(py, &whole, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0 ? -1
               : gck_input_skip_reason(py, &whole, codec, 0);
    }
    if (reason < 0 || (reason == GCK_COMPRESS && gck_view_again(py, in->x, &in->view, &view) < 0)) {
        done = -1;
    } else if (reason == GCK_COMPRESS && keeps_strides(&whole.view) && lies_within(&view, &whole.view, &offset)) {
        /* One after the other: no attribute is read with an error set. */
        GCK_SCOPED PyObject *shape = PyObject_GetAttr(in->x, py->names.shape);
        GCK_SCOPED PyObject *stride = shape != NULL ? PyObject_CallMethod(in->x, "stride", NULL) : NULL;
        to->view = stride != NULL ? Py_BuildValue("(OOL)", shape, stride, (long long)offset) : NULL;
        done = to->view == NULL ? -1 : encode(self, codec, &whole, view.numel < whole.view.numel, to, why, batch);
    }
    if (done != 1) {
        Py_CLEAR(to->view);
    }
    return done != 0 ? done : encode(self, codec, in, 0, to, why, batch);
}

/* Encode the tensor, or what the form has in its place.  1; 0: it has to stay uncompressed, for the
 * reason *reason; -1. */
static int encode_form(const gck_saved_hooks *self, const gck_saved_as *as, gck_input *in, gck_saved_form *to,
                       int *reason, gck_batch *batch)
{
    gck_py *py = &self->packing.state->py;
    gck_input made = as->part != NULL ? gck_input_of(as->part) : *in;
    int done = gck_input_read(py, &made, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0
             ? -1 : gck_input_skip_reason(py, &made, as->codec, 0);

    if (done != GCK_COMPRESS) {
        *reason = done == GCK_SKIP_DTYPE ? GCK_SKIP_EXACT : done;        /* half precision stays as it is */
        done = done < 0 ? -1 : 0;
    } else {
        done = as->part != NULL ? encode(self, as->codec, &made, 0, to, reason, batch)
                                : encode_view(self, as->codec, &made, to, reason, batch);
    }
    if (as->part != NULL) {
        to->dtype = done == 1 ? PyObject_GetAttr(in->x, py->names.dtype) : NULL;
        done = done == 1 && to->dtype == NULL ? -1 : done;
        gck_input_clear(&made);
    }
    return done;
}

/* ---- a storage that is kept uncompressed is kept once ---- */

/* 1 when this storage is also kept uncompressed; 0. */
static int is_held(const gck_saved_hooks *self, const void *storage)
{
    const gck_saved_list *l = storage != NULL ? gck_saved_list_of(self->waiting) : NULL;

    for (int i = 0; l != NULL && i < l->n; i++) {
        if (l->known[i]->form.entry.kind == GCK_PACKED_TENSOR && l->known[i]->form.storage == storage) {
            return 1;
        }
    }
    return 0;
}

int gck_saved_form_store(const gck_saved_hooks *self, const gck_saved_as *as, gck_input *in, gck_saved_form *to,
                         int reason, gck_batch *batch)
{
    gck_state *state = self->packing.state;
    const int outer = self->packing.outer, judged = reason == GCK_SKIP_EXACT || reason == GCK_SKIP_UNKNOWN;
    const int whole = as->codec != NULL && as->part == NULL;     /* then its view is needed anyway */
    int done = gck_input_read(&state->py, in, GCK_FACT_GRAD | GCK_FACT_LEAF | (whole ? GCK_FACT_VIEW : 0));

    if (done == 0 && judged && self->waiting != NULL && !outer) {
        done = gck_input_storage(&state->py, in, &to->storage);
    }
    if (done < 0 || (outer && push_outer(self) < 0)) {
        return -1;
    }
    if (as->codec != NULL && !is_held(self, to->storage)) {
        done = encode_form(self, as, in, to, &reason, batch);
    }
    if (done == 1) {
        to->rows = Py_XNewRef(as->rows);
        state->stats.eligible++;
        state->stats.compressed++;
    } else if (done == 0) {
        done = keep(self, in, to) < 0 ? -1 : gck_count_uncompressed(state, in->x, reason);
    }
    if (outer) {
        gck_hooks_pop(&state->py);
    }
    return done < 0 ? -1 : 0;
}

int gck_saved_form_become(const gck_saved_hooks *self, gck_saved_tensor *saved, const gck_saved_as *as, gck_input *in,
                          int reason, gck_batch *batch)
{
    GCK_CLEARED_BY(gck_saved_form_clear) gck_saved_form made = {.storage = NULL};

    if (gck_saved_form_store(self, as, in, &made, reason, batch) < 0) {
        return -1;
    }
    const gck_saved_form old = saved->form;
    saved->form = made;
    saved->epoch = self->packing.state->epoch;
    made = old;
    return 0;
}

int gck_saved_form_take_back(const gck_saved_hooks *self, gck_saved_tensor *of)
{
    gck_state *state = self->packing.state;
    const gck_saved_as exact = {.codec = NULL};
    const gck_payload *payload;
    GCK_CLEARED_BY(gck_input_clear) gck_input whole = {.x = NULL}, in = whole;
    const void *address = NULL;
    int64_t version;
    int status = 0, counted;

    if (of->form.entry.kind != GCK_PACKED_PAYLOAD || of->form.storage == NULL || of->form.dtype != NULL
        || self->packing.outer) {
        return 0;
    }
    payload = (gck_payload *)of->form.entry.value;
    version = payload->version;
    whole = gck_input_of(payload->original != NULL ? PyWeakref_GetObject(payload->original) : Py_None);
    if (whole.x != Py_None) {
        status = gck_input_read(&state->py, &whole, GCK_FACT_VERSION);
        status = status < 0 ? -1 : gck_storage_of(&state->py, whole.x, &address);
    }
    counted = of->epoch == state->epoch;
    if (status == 0 && address == of->form.storage && version >= 0 && whole.version == version
        && of->form.entry.kind == GCK_PACKED_PAYLOAD) {
        in.x = of->form.view != NULL ? gck_saved_form_view(&of->form, whole.x) : Py_NewRef(whole.x);
        status = in.x == NULL ? -1 : gck_saved_form_become(self, of, &exact, &in, GCK_SKIP_EXACT, NULL);
        if (status == 0 && counted) {
            state->stats.compressed--;
            state->stats.eligible--;
        }
    }
    return status;
}

int gck_saved_form_hold(const gck_saved_hooks *self, const gck_saved_form *form)
{
    const void *storage = form->entry.kind == GCK_PACKED_TENSOR ? form->storage : NULL;
    gck_saved_tensor *other;
    int status = 0;

    for (int i = 0; storage != NULL && status == 0 && (other = gck_saved_list_known(self->waiting, i)) != NULL; i++) {
        if (other->form.storage == storage) {
            GCK_SCOPED PyObject *held = Py_NewRef((PyObject *)other);
            status = gck_saved_form_take_back(self, other);
        }
    }
    return status;
}
