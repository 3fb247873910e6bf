/* saver.c: heap type Saver: the pair of hooks that decides how a saved tensor is kept.
 *
 * Nothing is recomputed: pack encodes, unpack decodes.  What has to stay exact is kept as
 * autograd keeps it, detached, so that the graph does not hold itself. */
#include "saver.h"

#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "role.h"
#include "rounding.h"
#include "waiting.h"

typedef struct {
    PyObject_HEAD
    gck_packing packing;
    PyObject   *waiting;                         /* see waiting.h; NULL: nothing is lost */
    PyObject   *outer_pack, *outer_unpack;       /* hooks around ours, or NULL           */
} saver;

/* ---- what is kept as it is ---- */

/* The hooks around ours become the innermost.  0 or -1. */
static int push_outer(const saver *self)
{
    PyObject *result = PyObject_CallFunctionObjArgs(self->packing.state->py.push_hooks, self->outer_pack,
                                                    self->outer_unpack, NULL);

    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* By reference, checked against its version at unpack.  0 or -1. */
static int keep(const saver *self, gck_input *in, gck_saved *to)
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
static int encode(const saver *self, const gck_codec *codec, gck_input *in, int only_found, gck_saved *to)
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
static int encode_view(const saver *self, const gck_codec *codec, gck_input *in, gck_saved *to)
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
static int encode_part(const saver *self, gck_role role, PyObject *x, gck_saved *to)
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
static int is_held(const saver *self, const void *storage)
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
static int take_back(const saver *self, gck_saved *of, const void *storage)
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
        status = fresh == NULL || in.x == NULL || keep(self, &in, fresh) < 0 ? -1 : 0;
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
static int hold(const saver *self, const void *storage)
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
static int encode_as(const saver *self, gck_role role, gck_input *in, gck_saved *to, int *verdict)
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
static int remember(const saver *self, gck_saved *to)
{
    if (to->storage == NULL) {
        return 0;
    }
    gck_waiting_remember(self->waiting, to);
    return to->entry.kind == GCK_VERSIONED ? hold(self, to->storage) : 0;
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
static int settle(gck_saved *saved, PyObject *node)
{
    PyObject *op = saved->saver;
    const saver *self = (saver *)op;
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
    done = done < 0 || role < 0 ? -1 : encode_as(self, (gck_role)role, &in, fresh, &verdict);
    verdict = done == 1 ? GCK_COMPRESS : node == NULL ? GCK_KEEP_UNKNOWN : verdict;
    if (done == 0 && !gone) {                    /* now the hooks around ours see it */
        done = keep(self, &in, fresh);
    }
    if (done >= 0) {
        saved->storage = fresh->storage;
        if (fresh->entry.value != NULL) {
            gck_saved_swap(saved, fresh);
        }
        done = remember(self, saved);
    }
    saved->saver = NULL;
    count_again(saved, verdict);
    Py_DECREF(op);
    Py_XDECREF((PyObject *)fresh);
    gck_input_clear(&in);
    return done < 0 ? -1 : 0;
}

/* ---- pack ---- */

/* How x is kept: a role, once the tensor may be encoded at all; or the reason why as it is. */
typedef struct {
    gck_role role;
    int      waits;                  /* the role is not known yet                         */
    int      verdict;                /* gck_verdict, or -1                                */
} decision;

/* Is x an output of an autograd Function that is saving just now?  1, 0, -1. */
static int is_being_saved(PyObject *node)
{
    PyObject *to_save;
    int truth;

    if (!(PyType_GetFlags(Py_TYPE(node)) & Py_TPFLAGS_HEAPTYPE)) {
        return 0;                                /* not made in Python */
    }
    to_save = PyObject_GetAttrString(node, "to_save");
    truth = to_save == NULL ? -1 : to_save != Py_None;
    Py_XDECREF(to_save);
    return truth;
}

/* x requires grad: what the graph tells.  `number`: of the node that is being made.  0 or -1. */
static int judge_saver(const saver *self, PyObject *x, PyObject *node, int64_t number, decision *d)
{
    const gck_py *py = &self->packing.state->py;
    const int leaf = node != Py_None ? gck_is_of_leaf(py, x, node) : 0;
    const int64_t made = leaf == 0 && node != Py_None ? gck_node_number(py, node) : 0;
    int role = GCK_ROLE_VALUES, own;

    if (leaf != 0 || made < 0) {
        d->verdict = GCK_KEEP_LEAF;
        return leaf < 0 || made < 0 ? -1 : 0;
    }
    if (self->waiting == NULL || gck_entry_of_region || d->verdict != GCK_COMPRESS) {
        return 0;
    }
    own = made >= number ? 1 : node != Py_None ? is_being_saved(node) : 0;
    if (own > 0) {
        role = made == number ? gck_role_of_result(node, x) : GCK_ROLE_EXACT;
    }
    d->waits = own == 0;
    d->role = (gck_role)role;
    return own < 0 || role < 0 ? -1 : 0;
}

/* Values in memory: those of an expanded tensor are one. */
static int64_t values_of(const gck_tensor *x)
{
    int64_t n = 1;

    for (int d = 0; d < x->ndim; d++) {
        n *= x->strides != NULL && x->strides[d] == 0 ? 1 : x->sizes[d];
    }
    return n;
}

static decision judge(const saver *self, gck_input *in, PyObject *node, int64_t number)
{
    gck_py *py = &self->packing.state->py;
    const gck_plan *plan = &self->packing.plan;
    decision d = {.role = GCK_ROLE_VALUES, .verdict = -1};
    int tracing;

    if (gck_input_read(py, in, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0) {
        return d;
    }
    if ((in->requires_grad && in->leaf && !plan->leaves) || (PyObject *)Py_TYPE(in->x) == py->Parameter) {
        d.verdict = GCK_KEEP_LEAF;
        return d;
    }
    d.role = in->requires_grad ? GCK_ROLE_VALUES : GCK_ROLE_MASK;
    d.verdict = gck_input_judge(py, in, in->requires_grad ? plan->codec : gck_codec_find("mask"), plan->min_numel);
    if (self->waiting != NULL && (d.verdict == GCK_COMPRESS || d.verdict == GCK_KEEP_SMALL)) {
        gck_waiting_note(self->waiting, number, values_of(&in->view));
    }
    if (d.verdict == GCK_KEEP_DTYPE && !in->requires_grad) {
        d.verdict = GCK_KEEP_NO_GRAD;
    }
    if (d.verdict == GCK_COMPRESS && (tracing = gck_tracing(py)) != 0) {
        d.verdict = tracing < 0 ? -1 : GCK_KEEP_TRACING;
    }
    if (in->requires_grad && (d.verdict == GCK_COMPRESS || d.verdict == GCK_KEEP_SMALL)
        && judge_saver(self, in->x, node, number, &d) < 0) {
        d.verdict = -1;
    }
    return d;
}

/* The tensor waits in `to`.  0 or -1. */
static int wait(saver *self, gck_input *in, int64_t number, gck_saved *to)
{
    gck_state *state = self->packing.state;
    gck_packing packing = self->packing;
    const int64_t kept = state->stats.kept_bytes;

    packing.outer = 0;                           /* they see what it becomes */
    if (gck_entry_keep(&packing, in, &to->entry) < 0 || gck_count_kept(state, in->x, GCK_KEEP_UNKNOWN) < 0) {
        return -1;
    }
    if (to->entry.kind != GCK_VERSIONED) {
        return 0;
    }
    to->number = number;
    to->numel = values_of(&in->view);
    to->nbytes = to->waits = state->stats.kept_bytes - kept;
    to->epoch = state->epoch;
    to->saver = Py_NewRef((PyObject *)self);
    gck_count_live(state, to->waits);
    return gck_waiting_add(self->waiting, to, settle);
}

/* Called by autograd for every tensor it saves, without grad.  New reference: a Saved. */
static PyObject *pack(PyObject *op, PyObject *x)
{
    saver *self = (saver *)op;
    gck_state *state = self->packing.state;
    /* First: to ask for the node of a view that was changed in place makes nodes. */
    const int64_t number = self->waiting != NULL ? gck_last_node_number(&state->py) : 0;
    PyObject *node = number < 0 ? NULL : PyObject_GetAttr(x, state->py.names.grad_fn);
    gck_saved *to = node != NULL ? gck_saved_new(state) : NULL;
    gck_input in = gck_input_of(x);
    decision d = {.verdict = -1};
    int done = to == NULL ? -1 : 0;

    if (done == 0 && self->waiting != NULL && node != Py_None) {
        done = gck_waiting_reach(self->waiting, state, node, number, settle);
    }
    if (done == 0) {
        d = judge(self, &in, node, number);
        done = d.verdict < 0 ? -1 : 0;
    }
    if (done == 0 && d.verdict == GCK_COMPRESS && d.waits) {
        done = wait(self, &in, number, to) < 0 ? -1 : 2;
    } else if (done == 0 && d.verdict == GCK_COMPRESS) {
        done = encode_as(self, d.role, &in, to, &d.verdict);
    }
    if (done == 1) {
        state->stats.asked++;
        state->stats.compressed++;
    } else if (done == 0) {
        done = keep(self, &in, to) < 0 ? -1 : gck_count_kept(state, x, d.verdict);
    }
    if (done >= 0 && done < 2) {
        done = remember(self, to);
    }
    if (done < 0) {
        Py_CLEAR(to);
    }
    Py_XDECREF(node);
    gck_input_clear(&in);
    return (PyObject *)to;
}

/* What autograd gets back: without history, which it has itself. */
static PyObject *unpack(PyObject *op, PyObject *packed)
{
    gck_state *state = ((saver *)op)->packing.state;

    if (Py_TYPE(packed) != state->Saved) {
        return PyErr_Format(PyExc_TypeError, "gradckpt: not a saved tensor of compress_saved(): %R", Py_TYPE(packed));
    }
    return gck_saved_restore((gck_saved *)packed);
}

static PyMethodDef pack_def = {"pack", pack, METH_O, NULL};
static PyMethodDef unpack_def = {"unpack", unpack, METH_O, NULL};

/* ---- Saver ---- */

static int saver_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((saver *)op)->outer_pack);
    Py_VISIT(((saver *)op)->outer_unpack);
    Py_VISIT(((saver *)op)->waiting);
    return 0;
}

static int saver_clear(PyObject *op)
{
    Py_CLEAR(((saver *)op)->outer_pack);
    Py_CLEAR(((saver *)op)->outer_unpack);
    Py_CLEAR(((saver *)op)->waiting);
    return 0;
}

static void saver_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    saver_clear(op);
    PyObject_GC_Del(op);
    Py_DECREF(type);
}

static PyType_Slot saver_slots[] = {
    {Py_tp_dealloc, saver_dealloc},
    {Py_tp_traverse, saver_traverse},
    {Py_tp_clear, saver_clear},
    {0, NULL},
};

PyType_Spec gck_saver_spec = {
    .name = "gradckpt._C.Saver",
    .basicsize = sizeof(saver),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = saver_slots,
};

static int is_ours(PyObject *hook) { return PyCFunction_CheckExact(hook) && PyCFunction_GetFunction(hook) == pack; }

/* The hooks around ours see the bytes of our payloads.  Around other hooks of this file are
 * those that these had: the innermost codec is meant.  0 or -1. */
static int find_outer(saver *self, const gck_py *py)
{
    PyObject *top = PyObject_CallFunctionObjArgs(py->top_hooks, Py_True, NULL);
    PyObject *outer_pack = NULL, *outer_unpack = NULL;

    if (top == NULL || (top != Py_None && !PyArg_ParseTuple(top, "OO", &outer_pack, &outer_unpack))) {
        Py_XDECREF(top);
        return -1;
    }
    if (outer_pack != NULL && is_ours(outer_pack)) {
        const saver *around = (saver *)PyCFunction_GetSelf(outer_pack);
        outer_pack = around->outer_pack;
        outer_unpack = around->outer_unpack;
    }
    self->outer_pack = Py_XNewRef(outer_pack);
    self->outer_unpack = Py_XNewRef(outer_unpack);
    self->packing.outer = outer_pack != NULL;
    Py_DECREF(top);
    return 0;
}

/* 0 or -1, and nothing pushed. */
static int push(gck_state *state, PyObject *compress)
{
    gck_plan plan;
    saver *self;
    int status = -1;

    if (gck_options_plan(state, compress, &plan) < 0) {
        return -1;
    }
    if (plan.codec == NULL) {
        PyErr_SetString(PyExc_ValueError, "gradckpt: compress_saved() needs a codec");
        return -1;
    }
    self = PyObject_GC_New(saver, state->Saver);
    if (self == NULL) {
        return -1;
    }
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->packing = (gck_packing){state, plan, 0, 0, NULL, {NULL, NULL, 0, NULL}};
    PyObject_GC_Track(self);
    if (find_outer(self, &state->py) == 0
        && (plan.codec->max_error == 0 || (self->waiting = gck_waiting_of_thread()) != NULL)) {
        status = gck_hooks_push(&state->py, &pack_def, &unpack_def, (PyObject *)self);
    }
    Py_DECREF(self);
    return status;
}

int gck_saver_decisions(PyObject *hooks)
{
    PyObject *hook = PyTuple_Check(hooks) ? PyTuple_GetItem(hooks, 0) : NULL;
    const int ours = hook != NULL && PyCFunction_CheckExact(hook) && PyCFunction_GetFunction(hook) == pack;

    return ours ? ((saver *)PyCFunction_GetSelf(hook))->packing.plan.decisions : 0;
}

PyObject *gck_saver_push(PyObject *module, PyObject *compress)
{
    return push(gck_state_of(module), compress) < 0 ? NULL : Py_NewRef(Py_None);
}

/* One that goes on waiting when the block has ended: without its graph, of which it may be a result.  0 or -1. */
static int stay(const saver *self, gck_saved *saved)
{
    gck_input in = gck_input_of(saved->entry.value);
    gck_saved *fresh = gck_saved_new(self->packing.state);
    void *storage = NULL;
    int status = fresh == NULL ? -1 : gck_input_read(&self->packing.state->py, &in, GCK_FACT_VERSION);

    Py_INCREF((PyObject *)saved);
    if (status == 0 && in.version == saved->entry.version) {
        status = keep(self, &in, fresh) < 0 || gck_storage_of(in.x, &storage) < 0 ? -1 : 0;
        if (status == 0 && saved->saver != NULL) {
            gck_saved_swap(saved, fresh);
        }
    }
    status = status < 0 || storage == NULL ? status : hold(self, storage);
    Py_DECREF((PyObject *)saved);
    Py_XDECREF((PyObject *)fresh);
    gck_input_clear(&in);
    return status;
}

/* The innermost hooks, ours, come off.  Hooks around them see now what still waits; without such
 * hooks it may wait for another block of this thread.  0 or -1. */
static int pop(gck_state *state)
{
    PyObject *top = PyObject_CallFunctionObjArgs(state->py.top_hooks, Py_True, NULL);
    PyObject *hook = top != NULL && top != Py_None ? PyTuple_GetItem(top, 0) : NULL;
    PyObject *op = hook != NULL && is_ours(hook) ? Py_NewRef(PyCFunction_GetSelf(hook)) : NULL;
    const saver *self = (saver *)op;
    gck_saved *saved;
    int status = top == NULL ? -1 : 0;

    Py_XDECREF(top);
    gck_hooks_pop(&state->py);
    if (op != NULL && self->waiting != NULL) {
        status = self->packing.outer ? gck_waiting_end(self->waiting, op, settle) : 0;
        for (int i = 0; status == 0 && (saved = gck_waiting_next(self->waiting, i)) != NULL; i++) {
            status = saved->saver == op ? stay(self, saved) : 0;
        }
    }
    Py_XDECREF(op);
    return status;
}

PyObject *gck_saver_pop(PyObject *module, PyObject *unused)
{
    (void)unused;
    return pop(gck_state_of(module)) < 0 ? NULL : Py_NewRef(Py_None);
}

/* What the function returned leads to the nodes that it made.  0 or -1. */
static int look_behind(gck_state *state, PyObject *result)
{
    PyObject *flat = PyObject_CallFunctionObjArgs(state->py.tree_flatten, result, NULL);
    PyObject *leaves = flat != NULL && PyTuple_Check(flat) ? PyTuple_GetItem(flat, 0) : NULL;
    PyObject *waiting = leaves != NULL && PyList_Check(leaves) ? gck_waiting_of_thread() : NULL;
    int status = waiting == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);                  /* borrowed from a list that is ours */
        PyObject *node = gck_is_tensor(&state->py, leaf) > 0 ? PyObject_GetAttr(leaf, state->py.names.grad_fn) : NULL;
        status = PyErr_Occurred() ? -1 : node != NULL && node != Py_None ? gck_waiting_reach(waiting, state, node, INT64_MAX, settle)
            : 0;
        Py_XDECREF(node);
    }
    Py_XDECREF(flat);
    Py_XDECREF(waiting);
    return status;
}

PyObject *gck_saver_call(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *compress, *function, *tuple, *kwargs, *result;
    PyObject *type, *value, *traceback;

    if (!PyArg_ParseTuple(args, "OOO!O!:saved_call", &compress, &function, &PyTuple_Type, &tuple, &PyDict_Type, &kwargs)
        || push(state, compress) < 0) {
        return NULL;
    }
    result = PyObject_Call(function, tuple, kwargs);
    if (result != NULL && look_behind(state, result) < 0) {
        Py_CLEAR(result);
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (pop(state) < 0) {
        Py_CLEAR(result);
    }
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
    return result;
}
