/* packed.c: decides which tensor becomes a payload and which is kept by reference, as in torch. */
#include "engine/payload/packed.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "torch/tensor.h"
#include "engine/payload/eligible.h"
#include "engine/payload/payload.h"
#include "engine/payload/payload_bytes.h"
#include "engine/payload/rounding.h"
#include "engine/payload/sharing.h"

#include <stdlib.h>

/* GCK_COMPRESS, a reason, or -1.  The checks are ordered by cost, and by what a user wants to know
 * first. */
static int judge(gck_packing *p, gck_input *in)
{
    gck_py *py = &p->state->py;
    const int parameter = (PyObject *)Py_TYPE(in->x) == py->Parameter;
    gck_skip_reason reason;

    if (gck_input_read(py, in, GCK_FACT_GRAD) < 0) {
        return -1;
    }
    reason = gck_eligible(&p->plan, in->requires_grad, 0, parameter);
    if (reason != GCK_COMPRESS) {
        return reason;
    }
    if (gck_input_read(py, in, GCK_FACT_LEAF) < 0) {
        return -1;
    }
    reason = gck_eligible(&p->plan, in->requires_grad, in->leaf, parameter);
    return reason != GCK_COMPRESS ? (int)reason : gck_input_judge(py, in, p->plan.codec, p->plan.min_numel);
}

int gck_count_bytes(const gck_py *py, PyObject *x, int64_t *counter)
{
    PyObject *nbytes = PyObject_GetAttr(x, py->names.nbytes);

    *counter += nbytes != NULL ? PyLong_AsLongLong(nbytes) : 0;
    Py_XDECREF(nbytes);
    return PyErr_Occurred() ? gck_clear_refusal() : 0;
}

int gck_count_uncompressed(gck_state *state, PyObject *x, int reason)
{
    gck_stats *s = &state->stats;

    s->uncompressed[reason]++;
    if (reason == GCK_SKIP_NO_GRAD || reason == GCK_SKIP_LEAF) {
        return 0;
    }
    s->eligible++;
    return gck_count_bytes(&state->py, x, &s->uncompressed_bytes);
}

void gck_count_uncompressed_bytes(gck_state *state, int64_t nbytes, int reason)
{
    const int counts = reason != GCK_SKIP_NO_GRAD && reason != GCK_SKIP_LEAF;

    state->stats.uncompressed[reason]++;
    state->stats.eligible += counts;
    state->stats.uncompressed_bytes += counts ? nbytes : 0;
}

/* Store in *forward what the forward gets in place of x.  0 or -1. */
static int replay(gck_packing *p, PyObject *x, PyObject *payload, PyObject **forward)
{
    *forward = p->plan.fake_quantize ? PyObject_CallFunction(p->state->py.call.straight_through, "OO", x, payload)
                              : Py_NewRef(x);
    return *forward == NULL ? -1 : 0;
}

/* New reference: a payload of the tensor, which has been judged, and *forward.  NULL with *fits = 0
 * when the codec overflows, else with an exception. */
static PyObject *make_payload(gck_packing *p, gck_input *in, PyObject **forward, int *fits)
{
    gck_state *state = p->state;
    /* Outer hooks and the fake-quantized forward read the bytes at once. */
    gck_batch *batch = p->outer || p->plan.fake_quantize ? NULL : p->batch;
    const gck_payload_use use = !p->outer ? GCK_FOR_REGION
                              : p->plan.fake_quantize ? GCK_FOR_REGION_READ : GCK_FOR_REGION_SAVED;
    gck_payload *first = p->outer ? NULL : gck_sharing_find(state, p->plan.codec, in, p->plan.stochastic, batch);
    PyObject *payload = NULL;
    gck_dither dither;

    *fits = 1;
    if (first != NULL || !PyErr_Occurred()) {
        payload = gck_payload_new(state, p->plan.codec, in, first, gck_next_dither(state, &p->plan, 0, &dither), use,
                                  batch, fits);
    }
    Py_XDECREF((PyObject *)first);
    if (payload != NULL
        && (replay(p, in->x, payload, forward) < 0
            || (use == GCK_FOR_REGION_READ && gck_payload_hand_over((gck_payload *)payload) < 0))) {
        Py_CLEAR(*forward);
        Py_CLEAR(payload);
    }
    return payload;
}

/* 1: in->x becomes a payload; 2: it is one already; 0: it must not be one; -1.
 *
 * A tensor that is an argument for the second time is restored once, because a function may test
 * `a is b`; not where each argument is an input of a node.  Outer hooks see it twice nevertheless:
 * a recompute in which the two are different objects has to save as many tensors. */
static int encode(gck_packing *p, gck_input *in, gck_packed *entry, PyObject **forward)
{
    const int reason = judge(p, in);
    PyObject *again, *payload = NULL, *fed = NULL;
    int fits = 1;

    if (reason != GCK_COMPRESS) {
        return reason < 0 ? -1 : gck_count_uncompressed(p->state, in->x, reason);
    }
    again = p->inputs == NULL ? gck_input_aliasing_find(&p->aliases, in, forward) : NULL;
    if (again == NULL || p->outer) {
        payload = make_payload(p, in, again == NULL ? forward : &fed, &fits);
        Py_XDECREF(fed);
        if (payload == NULL) {
            Py_XDECREF(again);
            Py_CLEAR(*forward);
            return fits ? -1 : gck_count_uncompressed(p->state, in->x, GCK_SKIP_OVERFLOW);
        }
    }
    if (again != NULL) {
        Py_XDECREF(payload);
        gck_payload_again((gck_payload *)again);
    }
    *entry = (gck_packed){GCK_PACKED_PAYLOAD, again != NULL ? again : payload, 0, 0, NULL, 0};
    p->state->stats.eligible++;
    p->state->stats.compressed++;
    p->payloads++;
    return again != NULL ? 2 : 1;
}

/* The same, and the check of aliases gets the tensor. */
static int pack_payload(gck_packing *p, gck_input *in, gck_packed *entry, PyObject **forward)
{
    const int packed = encode(p, in, entry, forward);

    if ((packed == 0 || packed == 1)
        && gck_input_aliasing_add(&p->aliases, &p->state->py, in, packed ? *forward : in->x,
                                  packed ? entry->value : NULL) < 0) {
        gck_packed_clear(entry);
        Py_CLEAR(*forward);
        return -1;
    }
    return packed > 0 ? 1 : packed;
}

/* 1, 0, or -1.  A subclass that does not answer counts as 0. */
static int is_inference(PyObject *x)
{
    const int truth = gck_is_true(PyObject_CallMethod(x, "is_inference", NULL));

    return truth < 0 ? gck_clear_refusal() : truth;
}

_Thread_local int gck_packing_for_region;

/* A positional tensor that stays is what autograd calls a saved tensor.  With saved-tensor
 * hooks around us it becomes torch's SavedTensor, which goes through them (R2).  Without,
 * that would only hold the tensor and its version, which we do ourselves for a tenth of
 * the cost.  SavedTensor also rejects inference tensors, with torch's error. */
int gck_pack_exactly(const gck_packing *p, gck_input *in, gck_packed *entry)
{
    gck_py *py = &p->state->py;
    PyObject *saved;
    int inference = 1;

    if (!p->outer) {
        if (gck_input_read(py, in, GCK_FACT_VERSION | GCK_FACT_LEAF) < 0) {
            return -1;
        }
        /* x.detach() of an inference tensor has a version and is itself an inference tensor: torch
         * rejects it below. */
        inference = in->version < 0 ? 1 : in->leaf ? is_inference(in->x) : 0;
    }
    if (inference == 0) {
        *entry = (gck_packed){GCK_PACKED_TENSOR, Py_NewRef(in->x), in->version, in->leaf, NULL, 0};
        return 0;
    }
    gck_packing_for_region++;
    saved = inference > 0 ? PyObject_CallFunctionObjArgs(py->make_saved_tensor, in->x, Py_False, NULL) : NULL;
    gck_packing_for_region--;
    if (saved == NULL) {
        return -1;
    }
    *entry = (gck_packed){GCK_PACKED_SAVED, saved, 0, 0, NULL, 0};
    return 0;
}

/* 1, 0, or -1.  A type whose metaclass refuses to be hashed is not a container. */
static int is_container(gck_py *py, PyObject *x)
{
    int known = PyDict_Contains(py->supported_nodes, (PyObject *)Py_TYPE(x));

    if (known < 0) {
        known = gck_clear_refusal();
    }
    return known != 0 || !PyTuple_Check(x) ? known : gck_has_attribute(x, "_fields");
}

/* Keep x, which is not a container.  1: as a payload, or as an input of a node; 0: by reference;
 * -1. */
static int pack_leaf(gck_packing *p, gck_input *in, int tensor, int positional, gck_packed *entry, PyObject **forward)
{
    int packed = tensor && p->plan.codec != NULL ? pack_payload(p, in, entry, forward) : 0;

    if (tensor && p->of_node) {
        *entry = (gck_packed){GCK_PACKED_BY_NODE, Py_NewRef(Py_None), 0, 0, NULL, 0};
        return 1;
    }
    if (tensor && packed >= 0 && p->inputs != NULL && PyList_Append(p->inputs, in->x) < 0) {
        gck_packed_clear(entry);
        return -1;
    }
    if (packed != 0) {
        return packed;
    }
    if (tensor && (positional || p->inputs != NULL)) {
        return gck_pack_exactly(p, in, entry) < 0 ? -1 : p->inputs != NULL;
    }
    *entry = (gck_packed){GCK_PACKED_OBJECT, Py_NewRef(in->x), 0, 0, NULL, 0};
    return 0;
}

/* Pack the leaves of a container.  The container is kept by reference as a whole, unless a leaf
 * became a payload or an input of a node: 1 packed, 0 not, -1. */
static int pack_leaves(gck_packing *p, PyObject *leaves, PyObject *spec, gck_packed *entry, PyObject **forward)
{
    const Py_ssize_t n = PyList_Size(leaves);
    gck_packed tree = {GCK_PACKED_TREE, NULL, 0, 0, calloc((size_t)n + 1, sizeof(gck_packed)), n};
    PyObject *fed = PyList_New(0);
    int result = 0;

    if (tree.leaves == NULL || fed == NULL) {
        PyErr_NoMemory();
        result = -1;
    }
    for (Py_ssize_t i = 0; result >= 0 && i < n; i++) {
        PyObject *leaf = PySequence_GetItem(leaves, i), *value = NULL;
        gck_input in = {.x = leaf};
        const int tensor = leaf != NULL ? gck_is_tensor(&p->state->py, leaf) : -1;
        const int packed = tensor < 0 ? -1 : pack_leaf(p, &in, tensor, 0, &tree.leaves[i], &value);
        result = packed < 0 || PyList_Append(fed, value != NULL ? value : leaf) < 0 ? -1 : result | packed;
        Py_XDECREF(value);
        gck_input_clear(&in);
    }
    if (result == 1 && p->plan.fake_quantize) {
        *forward = PyObject_CallFunctionObjArgs(p->state->py.tree_unflatten, fed, spec, NULL);
        result = *forward == NULL ? -1 : 1;
    }
    Py_XDECREF(fed);
    if (result == 1) {
        tree.value = Py_NewRef(spec);
        *entry = tree;
    } else {
        gck_packed_clear(&tree);
    }
    return result;
}

static int pack_container(gck_packing *p, PyObject *x, gck_packed *entry, PyObject **forward)
{
    PyObject *flat = PyObject_CallFunctionObjArgs(p->state->py.tree_flatten, x, NULL);
    PyObject *leaves, *spec;
    int packed = -1;

    if (flat != NULL && PyArg_ParseTuple(flat, "O!O", &PyList_Type, &leaves, &spec)) {
        packed = pack_leaves(p, leaves, spec, entry, forward);
    }
    Py_XDECREF(flat);
    return packed;
}

int gck_pack(gck_packing *p, PyObject *x, int positional, gck_packed *entry, PyObject **forward)
{
    gck_py *py = &p->state->py;
    gck_input in = gck_input_of(x);
    const int tensor = gck_is_tensor(py, x);
    int packed = tensor < 0 ? -1 : 0;

    *forward = NULL;
    if (tensor == 0 && (p->plan.codec != NULL || p->nested)) {
        const int container = is_container(py, x);
        packed = container > 0 ? pack_container(p, x, entry, forward) : container;
    }
    if (packed == 0) {
        packed = pack_leaf(p, &in, tensor, positional, entry, forward);
    }
    if (packed < 0) {
        Py_CLEAR(*forward);
    } else if (*forward == NULL) {
        *forward = Py_NewRef(x);
    }
    gck_input_clear(&in);
    return packed < 0 ? -1 : 0;
}

/* ---- the other way ---- */

static PyObject *restore_versioned(gck_state *state, PyObject *x, int64_t version, int was_leaf)
{
    gck_input in = {.x = x};

    if (gck_input_read(&state->py, &in, GCK_FACT_VERSION | (was_leaf ? 0 : GCK_FACT_LEAF)) < 0) {
        return NULL;
    }
    if (in.leaf) {
        PyErr_SetString(PyExc_RuntimeError,
                        "Trying to use a saved tensor that has been detached in-place, i.e. with .detach_()."
                        "This is not supported, please use out-of-place `.detach()` instead");
        return NULL;
    }
    if (in.version != version) {
        return PyObject_CallFunction(state->py.call.raise_modified, "OL", x, (long long)version);
    }
    return Py_NewRef(x);
}

/* The user's code assembles containers and may read the values. */
static PyObject *restore_tree(gck_state *state, const gck_packed *entry, gck_batch *batch, PyObject *inputs)
{
    PyObject *leaves = PyList_New(0), *tree = NULL;
    int status = leaves == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < entry->nleaves; i++) {
        status = gck_append(leaves, gck_packed_restore(state, &entry->leaves[i], batch, inputs));
    }
    if (status == 0 && gck_batch_flush(batch) == 0) {
        tree = PyObject_CallFunctionObjArgs(state->py.tree_unflatten, leaves, entry->value, NULL);
    }
    Py_XDECREF(leaves);
    return tree;
}

/* New reference: x without history, requiring grad when x does; it is also added to the list.
 * Takes x over. */
static PyObject *as_input(const gck_py *py, PyObject *x, PyObject *inputs)
{
    PyObject *copy = x != NULL ? PyObject_CallMethodObjArgs(x, py->names.detach, NULL) : NULL;
    PyObject *grad = copy != NULL ? PyObject_GetAttr(x, py->names.requires_grad) : NULL;

    if (grad == NULL || PyObject_SetAttr(copy, py->names.requires_grad, grad) < 0 || PyList_Append(inputs, copy) < 0) {
        Py_CLEAR(copy);
    }
    Py_XDECREF(x);
    Py_XDECREF(grad);
    return copy;
}

/* New reference: the tensor that this payload gave before, or gives now, in the recompute that the
 * batch belongs to. */
static PyObject *restore_payload(gck_payload *payload, gck_batch *batch, const PyObject *inputs)
{
    PyObject *x;

    if (!payload->again || inputs != NULL) {       /* faster: no other argument uses it */
        return gck_payload_restore(payload, batch);
    }
    if (batch->made == NULL && (batch->made = PyDict_New()) == NULL) {
        return NULL;
    }
    x = Py_XNewRef(PyDict_GetItemWithError(batch->made, (PyObject *)payload));
    if (x == NULL && !PyErr_Occurred() && (x = gck_payload_restore(payload, batch)) != NULL
        && PyDict_SetItem(batch->made, (PyObject *)payload, x) < 0) {
        Py_CLEAR(x);
    }
    return x;
}

PyObject *gck_packed_restore(gck_state *state, const gck_packed *entry, gck_batch *batch, PyObject *inputs)
{
    PyObject *value = Py_NewRef(entry->value), *x;           /* the code below may empty the entry */

    switch (entry->kind) {
    case GCK_PACKED_SAVED:     x = PyObject_CallMethodObjArgs(value, state->py.names.unpack, NULL); break;
    case GCK_PACKED_TENSOR: x = restore_versioned(state, value, entry->version, entry->leaf); break;
    case GCK_PACKED_PAYLOAD:   x = restore_payload((gck_payload *)value, batch, inputs); break;
    case GCK_PACKED_BY_NODE:   x = PyIter_Next(batch->saved); break;
    case GCK_PACKED_TREE:      x = restore_tree(state, entry, batch, inputs); inputs = NULL; break;
    default:            return value;
    }
    Py_DECREF(value);
    return inputs == NULL ? x : as_input(&state->py, x, inputs);
}

int gck_packed_touch(gck_state *state, gck_packed *entry)
{
    int status = 0;

    if (entry->kind == GCK_PACKED_TENSOR) {
        gck_input in = gck_input_of(entry->value);
        status = gck_input_read(&state->py, &in, GCK_FACT_VERSION);
        entry->version = in.version;
        gck_input_clear(&in);
    }
    for (Py_ssize_t i = 0; status == 0 && i < entry->nleaves; i++) {
        status = gck_packed_touch(state, &entry->leaves[i]);
    }
    return status;
}

int gck_packed_traverse(gck_packed *entry, visitproc visit, void *arg)
{
    Py_VISIT(entry->value);
    for (Py_ssize_t i = 0; i < entry->nleaves; i++) {
        int result = gck_packed_traverse(&entry->leaves[i], visit, arg);
        if (result != 0) {
            return result;
        }
    }
    return 0;
}

void gck_packed_clear(gck_packed *entry)
{
    gck_packed old = *entry;                      /* publish the empty entry first: clearing runs Python */

    *entry = (gck_packed){.value = NULL};
    Py_XDECREF(old.value);
    for (Py_ssize_t i = 0; i < old.nleaves; i++) {
        if (old.leaves != NULL) {
            gck_packed_clear(&old.leaves[i]);
        }
    }
    free(old.leaves);
}
