/* op_outputs.c: heap type OpOutput: what is kept of one call of an operator, and how it is returned. */
#include "engine/selective/op_outputs.h"

#include "gradckpt.h"
#include "torch/abi.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "torch/input.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/innermost_hooks.h"
#include "engine/rounding.h"
#include "engine/payload/packed.h"
#include "engine/payload/payload.h"
#include "engine/payload/payload_bytes.h"
#include "engine/payload/payload_decode.h"
#include "engine/payload/stats.h"

#include <structmember.h>

/* ---- what is kept of one output ---- */

#define OF(field) offsetof(gck_op_output, field)
static const gck_owned kept_owned[] = {OF(val), OF(unpack), OF(form), OF(others), OF(copy), 0};
#undef OF

static int kept_traverse(PyObject *op, visitproc visit, void *arg)
{
    return gck_object_visit(op, kept_owned, visit, arg);
}

static int kept_clear(PyObject *op) { return gck_owned_clear(op, kept_owned); }

static void kept_dealloc(PyObject *op)
{
    const gck_op_output *self = (gck_op_output *)op;

    PyObject_GC_UnTrack(op);
    if (self->counted_in != NULL) {
        gck_count_replay(self->counted_in, -self->counted);
    }
    kept_clear(op);
    gck_object_free(op);
}

static PyMemberDef kept_members[] = {
    {"val", T_OBJECT, offsetof(gck_op_output, val), READONLY,
     "What is kept: a detached tensor, a Payload, or no tensor."},
    {"form", T_OBJECT, offsetof(gck_op_output, form), READONLY, "What made it, of a discrete operator; or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot kept_slots[] = {
    {Py_tp_dealloc, kept_dealloc},
    {Py_tp_traverse, kept_traverse},
    {Py_tp_clear, kept_clear},
    {Py_tp_members, kept_members},
    {Py_tp_doc, "A kept output of an operator of a region."},
    {0, NULL},
};

PyType_Spec gck_op_output_spec = {
    .name = "gradckpt._C.OpOutput",
    .basicsize = sizeof(gck_op_output),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = kept_slots,
};

/* As autograd's kernel would make it.  Below autograd the keys for that are off, so they are switched
 * on meanwhile.  An inference mode inside the region stays on. */
PyObject *gck_op_output_alias(const gck_py *py, PyObject *x)
{
    const int excluded = gck_is_true(PyObject_CallFunctionObjArgs(py->is_excluded, py->key_inplace, NULL));
    PyObject *alias;

    if (excluded < 0
        || (excluded
            && gck_done(PyObject_CallFunctionObjArgs(py->set_excluded, py->key_inplace, Py_False, NULL)) < 0)) {
        return NULL;
    }
    alias = PyObject_CallMethodObjArgs(x, py->names.detach, NULL);
    if (excluded) {
        gck_error error = gck_error_take();
        gck_done(PyObject_CallFunctionObjArgs(py->set_excluded, py->key_inplace, Py_True, NULL));
        if (gck_error_return(&error) < 0) {
            Py_CLEAR(alias);
        }
    }
    return alias;
}

/* New reference: the payload, whose bytes the user's hooks take, if any see them. */
static PyObject *payload_of(gck_op_storage *store, gck_input *in, const gck_plan *plan, gck_skip_reason *skip)
{
    gck_state *state = store->state;
    const int use = store->hooks != NULL ? GCK_FOR_REGION_SAVED : GCK_FOR_REGION;
    PyObject *payload;
    gck_dither dither;

    *skip = GCK_COMPRESS;
    if (store->hooks != NULL && gck_done(PyObject_Call(state->py.push_hooks, store->hooks, NULL)) < 0) {
        return NULL;
    }
    payload = gck_payload_new(state, plan->codec, in, NULL, gck_next_dither(state, plan, 1, &dither), use,
                              plan->place, NULL, skip);
    if (store->hooks != NULL) {
        gck_hooks_pop(&state->py);
    }
    return payload;
}

/* New reference: the payload of x, or NULL without an exception when x stays uncompressed. */
static PyObject *encoded(gck_op_storage *store, PyObject *x, const gck_plan *plan)
{
    gck_state *state = store->state;
    gck_stats *s = &state->stats;
    GCK_CLEARED_BY(gck_input_clear) gck_input in = gck_input_of(x);
    PyObject *payload = NULL;
    gck_skip_reason skip;
    int reason = gck_input_read(&state->py, &in, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0 ? -1
                : gck_input_skip_reason(&state->py, &in, plan->codec, plan->min_numel);

    s->eligible += reason >= 0;
    if (reason == GCK_COMPRESS) {
        payload = payload_of(store, &in, plan, &skip);
        reason = (int)skip;
    }
    if (payload != NULL) {
        s->compressed++;
    } else if (reason > 0) {
        s->uncompressed[reason]++;
    }
    return payload;
}

/* New reference; takes over val, also on failure; NULL: making it raised. */
static gck_op_output *kept_new(gck_op_storage *store, PyObject *val, int64_t version)
{
    gck_op_output *self = val != NULL ? (gck_op_output *)PyType_GenericAlloc(store->state->OpOutput, 0) : NULL;

    if (self == NULL) {
        Py_XDECREF(val);
        return NULL;
    }
    self->val = val;
    self->version = version;
    return self;
}

/* New reference: what is kept of a tensor that no codec takes: itself, or what the user's hooks make of it. */
static PyObject *packed(gck_op_storage *store, PyObject *x)
{
    GCK_SCOPED PyObject *alias = gck_op_output_alias(&store->state->py, x), *made = NULL;

    if (alias == NULL || store->hooks == NULL) {
        return gck_give(&alias);
    }
    made = PyObject_CallFunctionObjArgs(PyTuple_GetItem(store->hooks, 0), alias, NULL);
    if (made == NULL || made == alias || Py_REFCNT(alias) == 1) {
        return gck_give(&made);
    }
    /* A tensor among other objects, such as the CPU's of save_on_cpu(), may be written into unseen. */
    GCK_SCOPED PyObject *copy = PyObject_CallMethod(alias, "clone", NULL);
    Py_CLEAR(made);
    return copy != NULL ? PyObject_CallFunctionObjArgs(PyTuple_GetItem(store->hooks, 0), copy, NULL) : NULL;
}

/* 1 when the tensor stands for one of a graph that is compiled, whose own counters know it; 0; -1. */
static int is_compiled(const gck_py *py, PyObject *x)
{
    return gck_is_plain_tensor(py, x) ? 0 : gck_tracing_modes(py);
}

static PyObject *keep_one(gck_op_storage *store, PyObject *x, const gck_plan *plan)
{
    const gck_py *py = &store->state->py;
    const int tensor = gck_is_tensor(py, x), compiled = tensor > 0 ? is_compiled(py, x) : 0;
    PyObject *val = tensor > 0 && compiled == 0 && plan != NULL && plan->codec != NULL ? encoded(store, x, plan) : NULL;
    GCK_SCOPED gck_op_output *kept = NULL;
    PyObject *unpack = NULL;
    int64_t version = -1;                        /* inference tensors have none: nothing to compare */
    int known = tensor;                          /* val is a tensor that may be written into */

    if (val == NULL && tensor >= 0 && compiled >= 0 && !PyErr_Occurred()) {
        val = tensor ? packed(store, x) : Py_NewRef(x);
        unpack = tensor && store->hooks != NULL ? PyTuple_GetItem(store->hooks, 1) : NULL;
        known = val != NULL && unpack != NULL ? gck_is_tensor(py, val) : tensor;
        if (val != NULL && known
            && (known < 0 || gck_version_of(py, val, &version) < 0
                || (!compiled && gck_count_bytes(py, val, &store->state->stats.policy_bytes) < 0))) {
            Py_CLEAR(val);
        }
    }
    store->state->stats.policy_outputs += tensor > 0 && !compiled && val != NULL;
    if ((kept = kept_new(store, val, version)) == NULL
        || (known && gck_memory_of(py, val, &kept->data, &kept->nbytes) < 0)) {
        return NULL;
    }
    kept->unpack = Py_XNewRef(unpack);
    return Py_NewRef((PyObject *)kept);
}

int gck_op_output_note(const gck_py *py, gck_op_output *kept, PyObject *alias)
{
    int64_t version;

    if ((kept->others == NULL && (kept->others = PyList_New(0)) == NULL) || gck_version_of(py, alias, &version) < 0) {
        return -1;
    }
    return gck_append(kept->others, Py_BuildValue("OL", alias, (long long)version));
}

/* Take the copy for the value. */
static int take_copy(gck_op_storage *store, gck_op_output *kept)
{
    const gck_py *py = &store->state->py;
    PyObject *old = kept->val;

    kept->val = kept->copy;
    kept->copy = NULL;
    kept->written = 0;
    Py_DECREF(old);
    Py_CLEAR(kept->others);
    return gck_memory_of(py, kept->val, &kept->data, &kept->nbytes) < 0
        ? -1 : gck_version_of(py, kept->val, &kept->version);
}

int gck_op_output_unwritten(const gck_py *py, const gck_op_output *kept)
{
    GCK_SCOPED PyObject *others = Py_XNewRef(kept->others);
    int64_t now, then;
    int same = 1;

    for (Py_ssize_t i = 0; others != NULL && same > 0 && i < PyList_Size(others); i++) {
        PyObject *row = PyList_GetItem(others, i);
        then = PyLong_AsLongLong(PyTuple_GetItem(row, 1));
        same = PyErr_Occurred() || gck_version_of(py, PyTuple_GetItem(row, 0), &now) < 0 ? -1 : now == then;
    }
    return same;
}

/* As gck_op_output_settle() of one output. */
static int settle_one(void *with, PyObject *x)
{
    gck_op_storage *store = with;
    const gck_py *py = &store->state->py;
    gck_op_output *kept = (gck_op_output *)x;
    int64_t now;

    if (Py_TYPE(x) != store->state->OpOutput || (kept->others == NULL && kept->copy == NULL && !kept->written)) {
        return 0;
    }
    if (gck_version_of(py, kept->val, &now) < 0 || now != kept->version) {
        return PyErr_Occurred() ? -1 : 0;        /* reported where the value is returned */
    }
    if (kept->copy != NULL) {
        return take_copy(store, kept);
    }
    const int same = kept->written ? 0 : gck_op_output_unwritten(py, kept);
    return same < 0 ? -1 : !same;
}

int gck_op_output_settle(gck_op_storage *store, PyObject *entry) { return gck_each_item(entry, settle_one, store); }

/* As gck_op_output_written() of one output. */
static int is_written(void *with, PyObject *x)
{
    const gck_state *state = with;
    const gck_op_output *kept = (gck_op_output *)x;
    int64_t now;

    return Py_TYPE(x) != state->OpOutput || kept->version < 0 ? 0
         : gck_version_of(&state->py, kept->val, &now) < 0 ? -1 : now != kept->version;
}

int gck_op_output_written(const gck_op_storage *store, PyObject *entry)
{
    return gck_each_item(entry, is_written, store->state);
}

/* Count an entry, which may be NULL, as a discrete output of so many bytes, alive until it is freed. */
static PyObject *counted(gck_op_storage *store, gck_op_output *entry, int64_t nbytes)
{
    store->state->stats.discrete_outputs += entry != NULL;
    if (entry != NULL && nbytes > 0) {
        entry->counted_in = store->state;
        entry->counted = nbytes;
        store->state->stats.discrete_bytes += nbytes;
        gck_count_replay(store->state, nbytes);
    }
    return (PyObject *)entry;
}

/* A copy of a discrete output; bool as bits. */
static PyObject *copy_one(gck_op_storage *store, PyObject *x, const gck_plan *Py_UNUSED(unused))
{
    gck_state *state = store->state;
    const gck_codec *bits = gck_codec_find("mask");
    const int tensor = gck_is_tensor(&state->py, x);
    PyObject *val = NULL;
    gck_skip_reason skip;
    int64_t nbytes = 0;
    int reason;

    if (tensor <= 0) {
        return tensor < 0 ? NULL : (PyObject *)kept_new(store, Py_NewRef(x), -1);
    }
    GCK_CLEARED_BY(gck_input_clear) gck_input in = gck_input_of(x);
    reason = gck_input_skip_reason(&state->py, &in, bits, 0);
    if (reason == GCK_COMPRESS) {
        val = gck_payload_new(state, bits, &in, NULL, NULL, GCK_FOR_USER, NULL, NULL, &skip);
        nbytes = val != NULL ? ((gck_payload *)val)->nbytes : 0;
    } else if (reason > 0 && (val = PyObject_CallMethod(x, "clone", NULL)) != NULL
               && gck_count_bytes(&state->py, val, &nbytes) < 0) {
        Py_CLEAR(val);
    }
    return counted(store, kept_new(store, val, -1), nbytes);
}

/* f(item) for each item of a tuple or list, into a tuple or list.  Items of a tuple after the first
 * (log-sum-exp, mean, state of a generator) have no plan and stay exact; those of a list are alike. */
typedef PyObject *item_function(gck_op_storage *store, PyObject *item, const gck_plan *plan);
static PyObject *map(gck_op_storage *store, PyObject *x, const gck_plan *plan, item_function *f)
{
    const int tuple = PyTuple_Check(x);
    const Py_ssize_t n = tuple || PyList_Check(x) ? PySequence_Size(x) : -1;
    PyObject *list;

    if (n < 0) {
        return f(store, x, plan);
    }
    list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        GCK_SCOPED PyObject *item = PySequence_GetItem(x, i);
        gck_add_item(&list, item != NULL ? map(store, item, tuple && i > 0 ? NULL : plan, f) : NULL);
    }
    return tuple ? gck_as_tuple(list) : list;
}

PyObject *gck_op_output_keep(gck_op_storage *store, PyObject *out, const gck_plan *plan)
{
    GCK_SCOPED PyObject *hooks = gck_hooks_that_see(store->state, store->alone, store->shown);
    PyObject *around = store->hooks, *kept;

    if (hooks == NULL) {
        return NULL;
    }
    store->hooks = hooks != Py_None ? hooks : around;
    kept = map(store, out, plan, keep_one);
    store->hooks = around;
    return kept;
}

/* form.keep(args, kwargs, b) or form.give(a, args, kwargs) without grad: not every operator is below autograd. */
static PyObject *ask_form(PyObject *form, const gck_call *call, const char *method, PyObject *a, PyObject *b)
{
    const bool grad = gck_torch.aoti_torch_grad_mode_is_enabled();
    PyObject *kwargs = call->kwargs != NULL ? call->kwargs : Py_None, *result;

    gck_torch.aoti_torch_grad_mode_set_enabled(false);
    result = a != NULL ? PyObject_CallMethod(form, method, "OOO", a, call->args, kwargs)
                       : PyObject_CallMethod(form, method, "OOO", call->args, kwargs, b);
    gck_torch.aoti_torch_grad_mode_set_enabled(grad);
    return result;
}

/* New reference: what the form returns for the call, if anything, with its bytes. */
static PyObject *keep_form(gck_op_storage *store, const gck_call *call, PyObject *form, PyObject *out)
{
    GCK_SCOPED PyObject *made = ask_form(form, call, "keep", NULL, out);
    gck_op_output *entry;
    PyObject *val;
    long long nbytes;

    if (made == NULL || made == Py_None) {
        return made != NULL ? Py_NewRef(store->state->py.recompute_mark) : NULL;
    }
    if (!PyArg_ParseTuple(made, "OL", &val, &nbytes) || (entry = kept_new(store, Py_NewRef(val), -1)) == NULL) {
        return NULL;
    }
    entry->form = Py_NewRef(form);
    return counted(store, entry, nbytes);
}

PyObject *gck_op_output_keep_discrete(gck_op_storage *store, const gck_call *call, PyObject *form, PyObject *out)
{
    return form != NULL ? keep_form(store, call, form, out) : map(store, out, NULL, copy_one);
}

int gck_op_output_note_draw(gck_op_storage *store, Py_ssize_t index, gck_draw *draw)
{
    GCK_SCOPED PyObject *drawn = gck_draw_end(&store->state->py, draw);
    int status = drawn == Py_None ? 0 : -1;

    if (drawn != NULL && drawn != Py_None
        && gck_count_bytes(&store->state->py, PyTuple_GetItem(drawn, 0), &store->state->stats.discrete_bytes) == 0
        && gck_count_bytes(&store->state->py, PyTuple_GetItem(drawn, 1), &store->state->stats.discrete_bytes) == 0
        && gck_count_random(store->state, PyTuple_GetItem(drawn, 0), &store->random_bytes) == 0
        && gck_count_random(store->state, PyTuple_GetItem(drawn, 1), &store->random_bytes) == 0
        && index < store->ncalls) {
        GCK_SCOPED PyObject *old = store->calls[index].drawn;
        store->calls[index].drawn = Py_NewRef(drawn);
        status = 0;
    }
    return status;
}

/* ---- the other way ---- */

/* Return the value of an entry that stays.  A discrete output, a copy, is copied again, because the
 * recompute may write into it.  Whether it writes into any other is seen by a version of its own. */
static PyObject *fresh(gck_op_storage *store, gck_op_output *kept)
{
    const gck_py *py = &store->state->py;
    GCK_SCOPED PyObject *alias = kept->version >= 0 ? PyObject_GetAttr(kept->val, py->names.data)
                                                    : PyObject_CallMethod(kept->val, "clone", NULL);

    return alias == NULL || (kept->version >= 0 && gck_op_output_note(py, kept, alias) < 0) ? NULL : gck_give(&alias);
}

static PyObject *value_of(gck_op_storage *store, PyObject *x, const gck_plan *Py_UNUSED(unused))
{
    gck_op_output *kept = (gck_op_output *)x;
    const gck_py *py = &store->state->py;
    int64_t now;

    if (Py_TYPE(x) != store->state->OpOutput) {
        return PyErr_Format(PyExc_TypeError,
                            "gradckpt: the storage of a selective region holds %R, which gradckpt did not write", x);
    }
    if (Py_TYPE(kept->val) == store->state->Payload) {
        return gck_payload_decode((gck_payload *)kept->val);
    }
    if (kept->version >= 0 && !store->mutation && gck_version_of(py, kept->val, &now) < 0) {
        return NULL;
    }
    if (kept->version >= 0 && !store->mutation && now != kept->version) {
        gck_raise_torchs(py, "mutated");
        return NULL;
    }
    GCK_SCOPED PyObject *given = kept->unpack == NULL ? Py_NewRef(kept->val)
                               : PyObject_CallFunctionObjArgs(kept->unpack, kept->val, NULL);
    if (given != kept->val) {                    /* not the very tensor */
        return gck_give(&given);
    }
    /* Autograd writes into the object it gets, so an entry that stays gives a new one. */
    return (store->reusable || kept->version < 0) && gck_is_tensor(py, kept->val) > 0 ? fresh(store, kept)
                                                                                      : Py_NewRef(kept->val);
}

PyObject *gck_op_output_give(gck_op_storage *store, const gck_call *call, PyObject *entry, PyObject *drawn)
{
    const gck_op_output *kept = (gck_op_output *)entry;
    GCK_SCOPED PyObject *result = Py_TYPE(entry) != store->state->OpOutput || kept->form == NULL
        ? map(store, entry, NULL, value_of) : ask_form(kept->form, call, "give", kept->val, NULL);

    return result != NULL && drawn != NULL && gck_draw_repeat(&store->state->py, call->args, call->kwargs, drawn) < 0
         ? NULL : gck_give(&result);
}
