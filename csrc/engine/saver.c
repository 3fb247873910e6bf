/* saver.c: heap type Saver: the pair of hooks that decides how a saved tensor is kept.
 *
 * Nothing is recomputed: pack encodes, unpack decodes.  What has to stay exact is kept as
 * autograd keeps it, detached, so that the graph does not hold itself. */
#include "saver.h"

#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "origin.h"
#include "rounding.h"
#include "saved.h"

typedef struct {
    PyObject_HEAD
    gck_packing packing;
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

/* The mask of x <= 0 (NaN lets gradients through, as in torch).  1, 0, -1. */
static int encode_signs(const saver *self, PyObject *x, gck_saved *to)
{
    gck_py *py = &self->packing.state->py;
    const gck_codec *codec = gck_codec_find("mask");
    gck_input mask = {.x = PyObject_CallMethod(x, "le", "i", 0)};
    int done = mask.x == NULL ? -1 : gck_input_judge(py, &mask, codec, 0);

    done = done < 0 ? -1 : done == GCK_COMPRESS ? encode(self, codec, &mask, 0, to) : 0;
    if (done == 1 && (to->dtype = PyObject_GetAttr(x, py->names.dtype)) == NULL) {
        done = -1;
    }
    gck_input_clear(&mask);
    return done;
}

/* x is being saved by a reduction that compares its input with it: the input, too, has to
 * be exact, and was encoded a moment ago.  0 or -1. */
static int unpack_input(const saver *self, PyObject *x)
{
    PyObject *before = gck_origin_saved(x, "_raw_saved_self"), *original = NULL, *input = NULL;
    gck_saved *of = (gck_saved *)before;
    int status = 0;

    if (before != NULL && Py_TYPE(before) == self->packing.state->Saved && of->entry.kind == GCK_PAYLOAD) {
        original = PyWeakref_GetObject(((gck_payload *)of->entry.value)->original);   /* borrowed */
        Py_XINCREF(original);
    }
    if (original != NULL && original != Py_None) {
        gck_input exact = {.x = of->ndim >= 0 ? gck_saved_view(of, original) : Py_NewRef(original)};
        input = Py_XNewRef(exact.x);
        gck_entry_clear(&of->entry);
        status = input == NULL ? -1 : keep(self, &exact, of);
        gck_input_clear(&exact);
        of->ndim = -1;
        self->packing.state->stats.compressed--;
        if (status == 0) {
            self->packing.state->stats.asked--;
            status = gck_count_kept(self->packing.state, input, GCK_KEEP_EXACT);
        }
    }
    Py_XDECREF(before);
    Py_XDECREF(original);
    Py_XDECREF(input);
    return status;
}

/* ---- pack ---- */

/* How x is kept: a codec, or the reason why as it is. */
typedef struct {
    const gck_codec *codec;
    gck_origin       origin;
    int              verdict;        /* gck_verdict, or -1 */
} decision;

/* x requires grad and is no leaf: what the graph tells. */
static void judge_origin(const gck_plan *plan, const gck_input *in, decision *d)
{
    const int lossy = plan->codec->max_error > 0;
    const int origin = gck_origin_of(in->x);

    if (origin < 0) {
        d->verdict = -1;
        return;
    }
    d->origin = (gck_origin)origin;
    if (origin == GCK_ORIGIN_LEAF) {
        d->verdict = GCK_KEEP_LEAF;
    } else if (origin == GCK_ORIGIN_STATISTIC || origin == GCK_ORIGIN_COMPARED) {
        d->verdict = lossy ? GCK_KEEP_EXACT : GCK_COMPRESS;
    } else if (origin == GCK_ORIGIN_LOG && lossy) {
        d->codec = gck_codec_find("fp16");
        d->verdict = in->view.dtype == GCK_F32 ? GCK_COMPRESS : GCK_KEEP_EXACT;
    }
}

static decision judge(const saver *self, gck_input *in)
{
    gck_py *py = &self->packing.state->py;
    const gck_plan *plan = &self->packing.plan;
    decision d = {.codec = plan->codec, .origin = GCK_ORIGIN_VALUES, .verdict = -1};
    int tracing;

    if (gck_input_read(py, in, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0) {
        return d;
    }
    if ((in->requires_grad && in->leaf && !plan->leaves) || (PyObject *)Py_TYPE(in->x) == py->Parameter) {
        d.verdict = GCK_KEEP_LEAF;
        return d;
    }
    if (!in->requires_grad) {
        d.codec = gck_codec_find("mask");
    }
    d.verdict = gck_input_judge(py, in, d.codec, plan->min_numel);
    if (d.verdict == GCK_KEEP_DTYPE && !in->requires_grad) {
        d.verdict = GCK_KEEP_NO_GRAD;
    }
    if (d.verdict == GCK_COMPRESS && (tracing = gck_tracing(py)) != 0) {
        d.verdict = tracing < 0 ? -1 : GCK_KEEP_TRACING;
    }
    if (in->requires_grad && !in->leaf && (d.verdict == GCK_COMPRESS || d.verdict == GCK_KEEP_SMALL)) {
        const int small = d.verdict == GCK_KEEP_SMALL;
        judge_origin(plan, in, &d);
        d.verdict = small && d.verdict == GCK_COMPRESS ? GCK_KEEP_SMALL : d.verdict;
    }
    return d;
}

/* Called by autograd for every tensor it saves, without grad.  New reference: a Saved. */
static PyObject *pack(PyObject *op, PyObject *x)
{
    const saver *self = (saver *)op;
    gck_state *state = self->packing.state;
    gck_saved *to = gck_saved_new(state);
    gck_input in = gck_input_of(x);
    decision d;
    int done = to == NULL ? -1 : 0;

    if (done == 0) {
        d = judge(self, &in);
        done = d.verdict < 0 ? -1 : 0;
    }
    if (done == 0 && d.origin == GCK_ORIGIN_COMPARED && self->packing.plan.codec->max_error > 0) {
        done = unpack_input(self, x);
    }
    if (done == 0 && d.verdict == GCK_COMPRESS) {
        done = d.origin == GCK_ORIGIN_SIGNS && d.codec->max_error > 0 ? encode_signs(self, x, to)
                                                                      : encode_view(self, d.codec, &in, to);
        d.verdict = done == 0 ? GCK_KEEP_FIT : d.verdict;
    }
    if (done == 1) {
        state->stats.asked++;
        state->stats.compressed++;
    } else if (done == 0) {
        done = keep(self, &in, to) < 0 ? -1 : gck_count_kept(state, x, d.verdict);
    }
    if (done < 0) {
        Py_CLEAR(to);
    }
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
    return 0;
}

static int saver_clear(PyObject *op)
{
    Py_CLEAR(((saver *)op)->outer_pack);
    Py_CLEAR(((saver *)op)->outer_unpack);
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
    if (outer_pack != NULL && PyCFunction_CheckExact(outer_pack) && PyCFunction_GetFunction(outer_pack) == pack) {
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
    int status;

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
    status = find_outer(self, &state->py) < 0 ? -1 : gck_hooks_push(&state->py, &pack_def, &unpack_def, (PyObject *)self);
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

PyObject *gck_saver_pop(PyObject *module, PyObject *unused)
{
    (void)unused;
    gck_hooks_pop(&gck_state_of(module)->py);
    Py_RETURN_NONE;
}

PyObject *gck_saver_call(PyObject *module, PyObject *args)
{
    gck_state *state = gck_state_of(module);
    PyObject *compress, *function, *tuple, *kwargs, *result;

    if (!PyArg_ParseTuple(args, "OOO!O!:saved_call", &compress, &function, &PyTuple_Type, &tuple, &PyDict_Type, &kwargs)
        || push(state, compress) < 0) {
        return NULL;
    }
    result = PyObject_Call(function, tuple, kwargs);
    gck_hooks_pop(&state->py);
    return result;
}
