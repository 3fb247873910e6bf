/* packed.c: decides which tensor becomes a payload and which is kept by reference, as in torch. */
#include "engine/payload/packed.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "torch/tensor.h"
#include "engine/checkpoint_options.h"
#include "engine/rounding.h"
#include "engine/payload/argument_state.h"
#include "engine/payload/payload.h"
#include "engine/payload/payload_bytes.h"
#include "engine/payload/sharing.h"

#include <stdlib.h>

/* GCK_COMPRESS, a reason, or -1.  The checks are ordered by cost, and by what a user wants to know
 * first. */
static int skip_reason(gck_packing *p, gck_input *in)
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
    if (reason != GCK_COMPRESS) {
        return reason;
    }
    const int of_input = gck_input_skip_reason(py, in, p->plan.codec, p->plan.min_numel);
    /* expanded: its memory counts, not its elements */
    return of_input == GCK_COMPRESS && in->view.strides != NULL && gck_distinct(&in->view) < p->plan.min_numel
         ? GCK_SKIP_SMALL : of_input;
}

int gck_count_bytes(const gck_py *py, PyObject *x, int64_t *counter)
{
    const int64_t nbytes = gck_as_int64(PyObject_GetAttr(x, py->names.nbytes));

    *counter += nbytes > 0 ? nbytes : 0;
    return PyErr_Occurred() ? gck_clear_refusal() : 0;
}

/* 1 when a tensor that stays uncompressed for this reason could have been compressed. */
static int could_be_compressed(int reason) { return reason != GCK_SKIP_NO_GRAD && reason != GCK_SKIP_LEAF; }

void gck_count_uncompressed_bytes(gck_state *state, int64_t nbytes, int reason, int by)
{
    state->stats.uncompressed[reason] += by;
    state->stats.eligible += could_be_compressed(reason) ? by : 0;
    state->stats.uncompressed_bytes += could_be_compressed(reason) ? by * nbytes : 0;
}

int gck_count_uncompressed(gck_state *state, PyObject *x, int reason)
{
    gck_count_uncompressed_bytes(state, 0, reason, 1);
    return could_be_compressed(reason) ? gck_count_bytes(&state->py, x, &state->stats.uncompressed_bytes) : 0;
}

/* New reference: a payload of the tensor, which the codec takes, and *forward.  NULL without an
 * exception: *skip says why. */
static PyObject *make_payload(gck_packing *p, gck_input *in, PyObject **forward, gck_skip_reason *skip)
{
    gck_state *state = p->state;
    /* Outer hooks and the fake-quantized forward read the bytes at once. */
    gck_batch *batch = p->outer || p->plan.fake_quantize ? NULL : p->batch;
    const gck_payload_use use = !p->outer ? GCK_FOR_REGION
                              : p->plan.fake_quantize ? GCK_FOR_REGION_READ : GCK_FOR_REGION_SAVED;
    GCK_SCOPED gck_payload *first = p->outer ? NULL
                                  : gck_sharing_find(state, p->plan.codec, in, p->plan.stochastic, 1, batch);
    GCK_SCOPED PyObject *payload = NULL;
    gck_dither dither;

    *skip = GCK_COMPRESS;
    if (first != NULL || !PyErr_Occurred()) {
        payload = gck_payload_new(state, p->plan.codec, in, first, gck_next_dither(state, &p->plan, 0, &dither), use,
                                  p->plan.place, batch, skip);
    }
    if (payload == NULL) {
        return NULL;
    }
    *forward = p->plan.fake_quantize ? PyObject_CallFunction(state->py.call.straight_through, "OO", in->x, payload)
                                     : Py_NewRef(in->x);
    if (*forward == NULL || (use == GCK_FOR_REGION_READ && gck_payload_hand_over((gck_payload *)payload) < 0)) {
        Py_CLEAR(*forward);
        return NULL;
    }
    return gck_give(&payload);
}

/* 1: in->x becomes a payload; 2: it is one already; 0: it must not be one; -1.
 *
 * A tensor that is an argument for the second time is restored once, because a function may test
 * `a is b`; not where each argument is an input of a node.  Outer hooks see it twice nevertheless:
 * a recompute in which the two are different objects has to save as many tensors. */
static int encode(gck_packing *p, gck_input *in, gck_packed *entry, PyObject **forward)
{
    GCK_SCOPED PyObject *again = NULL, *payload = NULL, *fed = NULL, *attributes = NULL;
    int reason = skip_reason(p, in);
    gck_skip_reason skip;

    if (reason == GCK_COMPRESS) {
        const int bound = p->exactly ? 1 : gck_attributes_read(&p->state->py, in->x, &attributes);
        reason = bound < 0 ? -1 : bound ? GCK_SKIP_ATTRIBUTE : GCK_COMPRESS;
    }
    if (reason != GCK_COMPRESS) {
        return reason < 0 ? -1 : gck_count_uncompressed(p->state, in->x, reason);
    }
    again = p->inputs == NULL ? gck_input_aliasing_find(p->aliases, in, forward) : NULL;
    if (again == NULL || p->outer) {
        payload = make_payload(p, in, again == NULL ? forward : &fed, &skip);
        if (payload == NULL || (again == NULL && *forward != in->x && gck_attributes_give(*forward, attributes) < 0)) {
            Py_CLEAR(*forward);
            return PyErr_Occurred() ? -1 : gck_count_uncompressed(p->state, in->x, skip);
        }
    }
    if (again != NULL) {
        gck_payload_again((gck_payload *)again);
    }
    *entry = (gck_packed){.kind = GCK_PACKED_PAYLOAD, .value = Py_NewRef(again != NULL ? again : payload),
                          .state = gck_give(&attributes)};
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
    *entry = (gck_packed){.kind = GCK_PACKED_SAVED, .value = saved};
    if (gck_input_read(py, in, GCK_FACT_VERSION | GCK_FACT_LEAF) < 0
        || (entry->state = PyWeakref_NewRef(in->x, NULL)) == NULL) {
        gck_packed_clear(entry);
        return -1;
    }
    entry->version = in->version;
    entry->leaf = in->leaf;
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
    GCK_SCOPED PyObject *fed = PyList_New(0);
    int result = 0;

    if (tree.leaves == NULL || fed == NULL) {
        PyErr_NoMemory();
        result = -1;
    }
    for (Py_ssize_t i = 0; result >= 0 && i < n; i++) {
        PyObject *leaf = PySequence_GetItem(leaves, i);
        GCK_SCOPED PyObject *value = NULL;
        GCK_CLEARED_BY(gck_input_clear) gck_input in = {.x = leaf};
        const int tensor = leaf != NULL ? gck_is_tensor(&p->state->py, leaf) : -1;
        const int packed = tensor < 0 ? -1 : pack_leaf(p, &in, tensor, 0, &tree.leaves[i], &value);
        result = packed < 0 || PyList_Append(fed, value != NULL ? value : leaf) < 0 ? -1 : result | packed;
    }
    if (result == 1 && p->plan.fake_quantize) {
        *forward = PyObject_CallFunctionObjArgs(p->state->py.tree_unflatten, fed, spec, NULL);
        result = *forward == NULL ? -1 : 1;
    }
    if (result == 1) {
        tree.value = Py_NewRef(spec);
        *entry = tree;
    } else {
        gck_packed_clear(&tree);
    }
    return result;
}

/* 1 when the container will be made again, because of one of its leaves; 0; -1. */
static int is_made_again(gck_packing *p, PyObject *leaves)
{
    int made = 0;

    for (Py_ssize_t i = 0; made == 0 && i < PyList_Size(leaves); i++) {
        GCK_CLEARED_BY(gck_input_clear) gck_input in = gck_input_of(PyList_GetItem(leaves, i));
        const int tensor = gck_is_tensor(&p->state->py, in.x);
        const int reason = tensor <= 0 ? tensor : p->inputs != NULL || p->plan.codec == NULL ? 0 : skip_reason(p, &in);
        made = tensor < 0 || reason < 0 ? -1 : tensor && reason == GCK_COMPRESS;
    }
    return made;
}

/* Read the state that a container has outside its leaves into entry->state.  1 when no copy can be
 * made; 0; -1. */
static int read_state(gck_packing *p, PyObject *x, PyObject *leaves, gck_packed *entry)
{
    const gck_py *py = &p->state->py;
    int bound = gck_container_may_have_state(py, x) ? is_made_again(p, leaves) : 0;

    if (bound > 0) {
        bound = gck_container_state_read(py, x, 1, &entry->state);
        if (bound > 0 && p->inputs != NULL && gck_container_state_read(py, x, 0, &entry->state) < 0) {
            bound = -1;                          /* a node needs the tensors as its inputs */
        }
    }
    return bound;
}

static int pack_container(gck_packing *p, PyObject *x, gck_packed *entry, PyObject **forward)
{
    GCK_SCOPED PyObject *flat = PyObject_CallFunctionObjArgs(p->state->py.tree_flatten, x, NULL);
    PyObject *leaves, *spec;
    GCK_CLEARED_BY(gck_packed_clear) gck_packed state = {.value = NULL};
    int packed = -1, bound;

    if (flat != NULL && PyArg_ParseTuple(flat, "O!O", &PyList_Type, &leaves, &spec)
        && (bound = read_state(p, x, leaves, &state)) >= 0) {
        p->exactly += bound;
        packed = pack_leaves(p, leaves, spec, entry, forward);
        p->exactly -= bound;
    }
    if (packed > 0) {
        entry->state = state.state;
        state.state = NULL;
        if (*forward != NULL && gck_container_state_give(&p->state->py, *forward, entry->state) < 0) {
            gck_packed_clear(entry);
            packed = -1;
        }
    }
    return packed;
}

int gck_pack(gck_packing *p, PyObject *x, int positional, gck_packed *entry, PyObject **forward)
{
    gck_py *py = &p->state->py;
    GCK_CLEARED_BY(gck_input_clear) gck_input in = gck_input_of(x);
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
    return packed < 0 ? -1 : 0;
}

/* Add the payloads in the entry, in order.  Returns their number so far. */
static Py_ssize_t collect(gck_packed *entry, gck_sliced *of, Py_ssize_t n)
{
    if (entry->kind == GCK_PACKED_PAYLOAD) {
        of[n++] = (gck_sliced){(gck_payload *)entry->value, &entry->slice, 0};
    }
    for (Py_ssize_t i = 0; i < entry->nleaves; i++) {
        n = collect(&entry->leaves[i], of, n);
    }
    return n;
}

int gck_pack_slices(gck_packing *p, gck_packed *entries, Py_ssize_t n)
{
    gck_sliced *of;
    Py_ssize_t found = 0;
    int status;

    if (p->payloads < 2) {
        return 0;
    }
    of = malloc(sizeof *of * (size_t)p->payloads);
    if (of == NULL) {
        return gck_done(PyErr_NoMemory());
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        found = collect(&entries[i], of, found);
    }
    status = gck_slices_find(&p->state->py, p->aliases, of, found);
    free(of);
    return status;
}

/* ---- the entries ---- */

int gck_packed_touch(gck_state *state, gck_packed *entry)
{
    int status = 0;

    if (entry->kind == GCK_PACKED_TENSOR) {
        GCK_CLEARED_BY(gck_input_clear) gck_input in = gck_input_of(entry->value);
        status = gck_input_read(&state->py, &in, GCK_FACT_VERSION);
        entry->version = in.version;
    }
    for (Py_ssize_t i = 0; status == 0 && i < entry->nleaves; i++) {
        status = gck_packed_touch(state, &entry->leaves[i]);
    }
    return status;
}

int gck_packed_traverse(gck_packed *entry, visitproc visit, void *arg)
{
    Py_VISIT(entry->value);
    Py_VISIT(entry->state);
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
    Py_XDECREF(old.state);
    for (Py_ssize_t i = 0; i < old.nleaves; i++) {
        if (old.leaves != NULL) {
            gck_packed_clear(&old.leaves[i]);
        }
    }
    free(old.leaves);
}
