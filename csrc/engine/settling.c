/* settling.c: keeps a saved tensor in the form that the node which saves it can do with. */
#include "settling.h"

#include "rounding.h"

/* ---- what is kept as it is ---- */

/* The hooks around ours become the innermost.  0 or -1. */
static int push_outer(const gck_saver *self)
{
    PyObject *result = PyObject_CallFunctionObjArgs(self->packing.state->py.push_hooks, self->outer_pack,
                                                    self->outer_unpack, NULL);

    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* By reference, checked against its version at unpack.  0 or -1. */
int gck_settling_keep(const gck_saver *self, gck_input *in, gck_saved *to)
{
    gck_py *py = &self->packing.state->py;
    gck_input plain = {.x = NULL};
    int status = gck_input_read(py, in, GCK_FACT_LEAF);

    if (status == 0) {
        plain.x = in->leaf ? Py_NewRef(in->x) : PyObject_CallMethodObjArgs(in->x, py->names.detach, NULL);
        status = plain.x == NULL || (self->packing.outer && push_outer(self) < 0) ? -1 : 0;
    }
    if (status == 0) {
        status = gck_entry_keep(&self->packing, &plain, &to->entry);
        if (self->packing.outer) {
            gck_hooks_pop(py);
        }
    }
    gck_input_clear(&plain);
    return status;
}

/* ---- what becomes a payload ---- */

/* x in the memory of a base; *offset in values.  1 when it lies there as a whole. */
static int lies_within(const gck_tensor *x, const gck_tensor *base, int itemsize, int64_t *offset)
{
    const intptr_t distance = (intptr_t)x->data - (intptr_t)base->data;
    int64_t last = *offset = distance / itemsize;

    for (int d = 0; d < x->ndim && x->strides != NULL; d++) {
        last += (x->sizes[d] - 1) * x->strides[d];
        if (x->strides[d] < 0) {
            return 0;
        }
    }
    last += x->strides == NULL ? x->numel - 1 : 0;
    return x->dtype == base->dtype && distance >= 0 && distance % itemsize == 0 && last < base->numel;
}

/* A payload of the tensor, found or made.  1; 0 when the codec cannot hold the values; -1.
 * only_found: 0 also when there is none yet. */
static int encode(const gck_saver *self, const gck_codec *codec, gck_input *in, int only_found, gck_saved *to)
{
    gck_state *state = self->packing.state;
    const gck_plan *plan = &self->packing.plan;
    const int stochastic = plan->stochastic && codec == plan->codec, outer = self->packing.outer;
    const gck_payload_use use = outer ? GCK_FOR_REGION_SAVED : GCK_FOR_REGION;
    gck_payload *first = outer ? NULL : gck_payload_find(state, codec, in, stochastic, NULL);
    PyObject *payload = NULL;
    gck_input own = *in;
    gck_dither dither;
    int fits = 1, done = -1;

    if (PyErr_Occurred() || (only_found && first == NULL)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    /* A device's verdict may come late, and the payload holds what it was made from until
     * then: not a tensor whose node holds the payload. */
    own.x = codec->refuses ? PyObject_CallMethodObjArgs(in->x, state->py.names.detach, NULL) : Py_NewRef(in->x);
    if (own.x != NULL && (!outer || push_outer(self) == 0)) {
        payload = gck_payload_new(state, codec, &own, first,
                                  stochastic ? gck_next_dither(state, plan, 0, &dither) : NULL, use, NULL, &fits);
        if (outer) {
            gck_hooks_pop(&state->py);
        }
    }
    if (payload == NULL) {
        done = fits ? -1 : 0;
    } else if (only_found && payload != (PyObject *)first) {
        done = 0;                                /* it was written to since, and costs more than a part of it */
    } else if (own.x == in->x || gck_payload_adopt((gck_payload *)payload, in->x) == 0) {
        to->entry = (gck_entry){GCK_PAYLOAD, Py_NewRef(payload), 0, 0, NULL, 0};
        done = 1;
    }
    gck_input_clear(&own);
    Py_XDECREF(payload);
    Py_XDECREF((PyObject *)first);
    return done;
}

/* What a payload of x gives back lies in memory as x does. */
static int keeps_strides(const gck_tensor *x)
{
    return x->strides == NULL || (x->ndim <= GCK_MAX_DIM && gck_is_dense(x));
}

/* The tensor, by the payload of the whole tensor that it is a view of where that costs no more
 * than its own: so all views of it share one.  1, 0, -1 as above. */
static int encode_view(const gck_saver *self, const gck_codec *codec, gck_input *in, gck_saved *to)
{
    gck_py *py = &self->packing.state->py;
    gck_input whole = {.x = PyObject_GetAttrString(in->x, "_base")};
    gck_tensor view;
    int64_t offset;
    int done = 0, verdict = whole.x == NULL ? -1 : GCK_KEEP_LAYOUT;

    if (whole.x != NULL && whole.x != Py_None) {
        verdict = gck_input_read(py, &whole, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0 ? -1 : gck_input_judge(py, &whole, codec, 0);
    }
    if (verdict < 0 || gck_view_again(py, in->x, &in->view, &view) < 0) {
        done = -1;
    } else if (verdict == GCK_COMPRESS && keeps_strides(&whole.view)
               && lies_within(&view, &whole.view, view.dtype == GCK_F32 ? 4 : view.dtype == GCK_BOOL ? 1 : 2, &offset)) {
        done = gck_saved_describe(to, &view, offset) < 0 ? -1
            : encode(self, codec, &whole, view.numel < whole.view.numel, to);
        to->ndim = done == 1 ? to->ndim : -1;
    }
    gck_input_clear(&whole);
    return done != 0 ? done : encode(self, codec, in, 0, to);
}

/* Something made of x instead: what backward reads of it.  Masks of x <= 0 and of x > 0 differ for
 * NaN, and so do the operators.  1, 0, -1. */
static int encode_part(const gck_saver *self, gck_role role, PyObject *x, gck_saved *to)
{
    gck_py *py = &self->packing.state->py;
    const int cut = role == GCK_ROLE_CUT;
    const gck_codec *codec = cut ? self->packing.plan.codec : gck_codec_find("mask");
    PyObject *plain = PyObject_CallMethodObjArgs(x, py->names.detach, NULL);     /* grad mode may be on */
    gck_input part = {.x = plain == NULL ? NULL : cut ? PyObject_CallMethod(plain, "clamp", "ii", -20, 20)
                          : PyObject_CallMethod(plain, role == GCK_ROLE_POSITIVE ? "gt" : "le", "i", 0)};
    int done = part.x == NULL || gck_input_read(py, &part, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0
        ? -1 : gck_input_judge(py, &part, codec, 0);

    done = done < 0 ? -1 : done == GCK_COMPRESS ? encode(self, codec, &part, 0, to) : 0;
    if (done == 1 && !cut && (to->dtype = PyObject_GetAttr(x, py->names.dtype)) == NULL) {
        done = -1;
    }
    Py_XDECREF(plain);
    gck_input_clear(&part);
    return done;
}

/* ---- a storage that somebody needs exactly is kept once ---- */

/* 1 when somebody keeps this storage as it is; 0. */
static int is_held(const gck_saver *self, const void *storage)
{
    for (int i = 0; i < GCK_WAITING_TENSORS && storage != NULL; i++) {
        const gck_saved *other = gck_waiting_settled(self->waiting, i);
        if (other != NULL && other->entry.kind == GCK_VERSIONED && other->storage == storage) {
            return 1;
        }
    }
    return 0;
}

/* `of` has a payload of what is kept as it is from now on: back to the tensor.  0 or -1. */
static int take_back(const gck_saver *self, gck_saved *of, const void *storage)
{
    gck_state *state = self->packing.state;
    const gck_payload *payload = (gck_payload *)of->entry.value;
    const int64_t version = payload->version;
    gck_input whole = gck_input_of(PyWeakref_GetObject(payload->original)), in = {.x = NULL};
    gck_saved *fresh = NULL;
    void *address = NULL;
    int status = 0;

    if (whole.x != Py_None) {
        status = gck_input_read(&state->py, &whole, GCK_FACT_VERSION) < 0 || gck_storage_of(whole.x, &address) < 0 ? -1 : 0;
    }
    if (status == 0 && address == storage && version >= 0 && whole.version == version && of->entry.kind == GCK_PAYLOAD) {
        fresh = gck_saved_new(state);
        in.x = of->ndim >= 0 ? gck_saved_view(of, whole.x) : Py_NewRef(whole.x);
        status = fresh == NULL || in.x == NULL || gck_settling_keep(self, &in, fresh) < 0 ? -1 : 0;
        if (status == 0) {
            gck_saved_swap(of, fresh);
            state->stats.compressed--;
            state->stats.asked--;
            status = gck_count_kept(state, in.x, GCK_KEEP_EXACT);
        }
    }
    Py_XDECREF((PyObject *)fresh);
    gck_input_clear(&whole);
    gck_input_clear(&in);
    return status;
}

/* A tensor of this storage stays as it is: so does what shares it.  0 or -1. */
int gck_settling_hold(const gck_saver *self, const void *storage)
{
    int status = 0;

    for (int i = 0; i < GCK_WAITING_TENSORS && status == 0; i++) {
        gck_saved *other = gck_waiting_settled(self->waiting, i);
        if (other != NULL && other->entry.kind == GCK_PAYLOAD && other->storage == storage && other->dtype == NULL) {
            Py_INCREF((PyObject *)other);
            status = take_back(self, other, storage);
            Py_DECREF((PyObject *)other);
        }
    }
    return status;
}

/* ---- what the saving node needs ---- */

/* Does a group of the codec hold values of several rows, of which one may be much larger?  What
 * backward does not tell apart is cut off then. */
static int mixes_rows(const gck_tensor *x)
{
    return x->numel > 0 && (x->ndim > 3 ? x->numel / x->sizes[0] : x->ndim > 0 ? x->sizes[x->ndim - 1] : 1) % 128 != 0;
}

/* The tensor in the form that the role asks for.  1; 0: it has to stay as it is, for the reason *verdict; -1. */
int gck_settling_encode(const gck_saver *self, gck_role role, gck_input *in, gck_saved *to, int *verdict)
{
    gck_py *py = &self->packing.state->py;
    const char *name = role == GCK_ROLE_FP16 ? "fp16" : role == GCK_ROLE_BF16 ? "bf16" : role == GCK_ROLE_MASK ? "mask" : NULL;
    const gck_codec *codec = name != NULL ? gck_codec_find(name) : self->packing.plan.codec;
    const int shared = self->waiting != NULL && !self->packing.outer && role != GCK_ROLE_MASK;
    void *storage = NULL;

    *verdict = GCK_KEEP_EXACT;
    if (gck_input_read(py, in, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0 || (shared && gck_storage_of(in->x, &storage) < 0)) {
        return -1;
    }
    to->storage = storage;
    if (role == GCK_ROLE_EXACT || (shared && is_held(self, storage))) {
        return 0;
    }
    *verdict = gck_input_judge(py, in, codec, 0);
    if (*verdict != GCK_COMPRESS) {
        *verdict = *verdict == GCK_KEEP_DTYPE ? GCK_KEEP_EXACT : *verdict;       /* half precision as such */
        return *verdict < 0 ? -1 : 0;
    }
    *verdict = GCK_KEEP_FIT;
    to->role = role;
    return role == GCK_ROLE_POSITIVE || role == GCK_ROLE_POSITIVE_OR_NAN || (role == GCK_ROLE_CUT && mixes_rows(&in->view))
        ? encode_part(self, role, in->x, to) : encode_view(self, codec, in, to);
}

/* Decided: `to` is remembered.  0 or -1. */
int gck_settling_remember(const gck_saver *self, gck_saved *to)
{
    if (to->storage == NULL) {
        return 0;
    }
    gck_waiting_remember(self->waiting, to);
    return to->entry.kind == GCK_VERSIONED ? gck_settling_hold(self, to->storage) : 0;
}

/* What waited was counted as kept for a reason that holds no longer. */
static void count_again(gck_saved *saved, int verdict)
{
    gck_stats *s = &saved->state->stats;

    s->live_bytes -= saved->waits;
    if (saved->epoch == saved->state->epoch && verdict != GCK_KEEP_UNKNOWN) {
        s->kept[GCK_KEEP_UNKNOWN]--;
        s->kept[verdict] += verdict != GCK_COMPRESS;
        s->compressed += verdict == GCK_COMPRESS;
        s->kept_bytes -= verdict == GCK_COMPRESS ? saved->nbytes : 0;
    }
}

/* See waiting.h: the tensor becomes what its node needs, or stays. */
int gck_settling_settle(gck_saved *saved, PyObject *node)
{
    PyObject *op = saved->saver;
    const gck_saver *self = (gck_saver *)op;
    gck_py *py = &saved->state->py;
    gck_input in = gck_input_of(saved->entry.value);
    gck_saved *fresh = gck_saved_new(saved->state);
    int verdict = GCK_KEEP_UNKNOWN, done = fresh == NULL ? -1 : gck_input_read(py, &in, GCK_FACT_VERSION);
    int role = done < 0 || node == NULL ? GCK_ROLE_EXACT : gck_role_of_input(py, node, (PyObject *)saved, in.x);

    /* Values that are gone: unpack says so, as torch does. */
    const int gone = in.version != saved->entry.version;

    if (gone || (role == GCK_ROLE_FACTOR && saved->numel < saved->widest)) {
        role = GCK_ROLE_EXACT;
    }
    done = done < 0 || role < 0 ? -1 : gck_settling_encode(self, (gck_role)role, &in, fresh, &verdict);
    verdict = done == 1 ? GCK_COMPRESS : node == NULL ? GCK_KEEP_UNKNOWN : verdict;
    if (done == 0 && !gone) {                    /* now the hooks around ours see it */
        done = gck_settling_keep(self, &in, fresh);
    }
    if (done >= 0) {
        saved->storage = fresh->storage;
        if (fresh->entry.value != NULL) {
            gck_saved_swap(saved, fresh);
        }
        done = gck_settling_remember(self, saved);
    }
    saved->saver = NULL;
    count_again(saved, verdict);
    Py_DECREF(op);
    Py_XDECREF((PyObject *)fresh);
    gck_input_clear(&in);
    return done < 0 ? -1 : 0;
}
