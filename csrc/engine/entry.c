/* entry.c: decides what becomes a payload and what is kept by reference, as torch does. */
#include "entry.h"

#include <stdlib.h>

/* GCK_COMPRESS with *view, a reason, or -1.  The order of the questions is the order of
 * their cost, and of what a user would want to hear first. */
static int judge(gck_packing *p, PyObject *x, gck_tensor *view)
{
    gck_py *py = &p->state->py;
    const int requires_grad = gck_attr_is_true(x, py->names.requires_grad);
    int leaf, verdict;

    if (requires_grad < 0) {
        return -1;
    }
    if (!requires_grad && !p->plan.floating) {
        return GCK_KEEP_NO_GRAD;
    }
    leaf = requires_grad ? gck_attr_is_true(x, py->names.is_leaf) : 0;
    if (leaf < 0) {
        return -1;
    }
    /* A parameter, or a tensor whose .grad the user wants: it stays alive anyway. */
    if ((leaf && !p->plan.leaves) || (PyObject *)Py_TYPE(x) == py->Parameter) {
        return GCK_KEEP_LEAF;
    }
    verdict = gck_tensor_view(py, x, p->plan.codec->dtypes, view);
    if (verdict != GCK_COMPRESS) {
        return verdict;
    }
    return view->numel < p->plan.min_numel ? GCK_KEEP_SMALL : GCK_COMPRESS;
}

int gck_count_kept(gck_state *state, PyObject *x, int verdict)
{
    gck_stats *s = &state->stats;
    PyObject *nbytes;

    s->kept[verdict]++;
    if (verdict == GCK_KEEP_NO_GRAD || verdict == GCK_KEEP_LEAF) {
        return 0;
    }
    s->asked++;
    nbytes = PyObject_GetAttrString(x, "nbytes");
    if (nbytes == NULL) {
        PyErr_Clear();                           /* a subclass may refuse: the count goes without it */
        return 0;
    }
    s->kept_bytes += PyLong_AsLongLong(nbytes);
    Py_DECREF(nbytes);
    PyErr_Clear();
    return 0;
}

/* *forward := what the forward gets in place of x.  0 or -1. */
static int replay(gck_packing *p, PyObject *x, PyObject *payload, PyObject **forward)
{
    *forward = p->plan.replay ? PyObject_CallMethod(p->state->py.shim, "straight_through", "OO", x, payload)
                              : Py_NewRef(x);
    return *forward == NULL ? -1 : 0;
}

const gck_dither *gck_next_dither(gck_state *state, const gck_plan *plan, gck_dither *dither)
{
    gck_rounding *r = &state->rounding;

    if (!plan->stochastic) {
        return NULL;
    }
    if (r->restored) {
        *r = (gck_rounding){r->step + 1, 0, 0};
    }
    *dither = (gck_dither){plan->seed, r->step, r->tensor++};
    return dither;
}

/* x becomes a payload: 1; or may not: 0; or -1. */
static int encode(gck_packing *p, PyObject *x, gck_entry *entry, PyObject **forward)
{
    gck_state *state = p->state;
    gck_tensor view;
    const int verdict = judge(p, x, &view);
    PyObject *payload;
    gck_dither dither;
    /* Outer hooks and the replay read the bytes at once. */
    gck_batch *batch = p->outer || p->plan.replay ? NULL : p->batch;
    int fits = 1;

    if (verdict < 0) {
        return -1;
    }
    if (verdict != GCK_COMPRESS) {
        return gck_count_kept(state, x, verdict);
    }
    payload = p->outer ? NULL : gck_payload_find(state, p->plan.codec, x, &view, p->plan.stochastic, batch);
    if (payload != NULL) {
        state->stats.shared++;
    } else if (PyErr_Occurred()
               || (payload = gck_payload_new(state, p->plan.codec, x, &view, gck_next_dither(state, &p->plan, &dither),
                                             p->outer ? GCK_FOR_REGION_SAVED : GCK_FOR_REGION, batch, &fits)) == NULL) {
        return fits ? -1 : gck_count_kept(state, x, GCK_KEEP_FIT);
    }
    if (replay(p, x, payload, forward) < 0) {
        Py_DECREF(payload);
        return -1;
    }
    *entry = (gck_entry){GCK_PAYLOAD, payload, 0, 0, NULL, 0};
    state->stats.asked++;
    state->stats.compressed++;
    p->payloads++;
    return 1;
}

/* The same, and x is known to the check of aliases. */
static int pack_payload(gck_packing *p, PyObject *x, gck_entry *entry, PyObject **forward)
{
    const int packed = encode(p, x, entry, forward);

    if (packed >= 0 && gck_aliases_add(&p->aliases, &p->state->py, x, packed ? *forward : x, packed) < 0) {
        gck_entry_clear(entry);
        Py_CLEAR(*forward);
        return -1;
    }
    return packed;
}

int gck_entry_encode(gck_packing *p, PyObject *x, gck_entry *entry)
{
    PyObject *forward = NULL;
    const int packed = pack_payload(p, x, entry, &forward);

    Py_XDECREF(forward);
    return packed;
}

/* -1 with an exception: inference tensors have no version. */
static int64_t version_of(const gck_py *py, PyObject *x)
{
    PyObject *value = PyObject_GetAttr(x, py->names._version);
    const int64_t version = value == NULL ? -1 : PyLong_AsLongLong(value);

    Py_XDECREF(value);
    return version;
}

static int is_inference(PyObject *x)
{
    PyObject *value = PyObject_CallMethod(x, "is_inference", NULL);
    const int truth = value == Py_True;

    Py_XDECREF(value);
    PyErr_Clear();
    return truth;
}

_Thread_local int gck_entry_of_region;

int gck_entry_is_unchanged(gck_state *state, const gck_entry *entry)
{
    const int64_t now = version_of(&state->py, entry->value);

    return now < 0 ? -1 : now == entry->version;
}

/* A positional tensor that stays is what autograd calls a saved tensor.  With saved-tensor
 * hooks around us it becomes torch's SavedTensor, which goes through them (R2).  Without,
 * that would only hold the tensor and its version, which we do ourselves for a tenth of
 * the cost.  SavedTensor also refuses inference tensors, with the words users know. */
int gck_entry_keep(const gck_packing *p, PyObject *x, gck_entry *entry)
{
    const gck_py *py = &p->state->py;
    PyObject *saved;

    if (!p->outer) {
        const int64_t version = version_of(py, x);
        const int leaf = version >= 0 ? gck_attr_is_true(x, py->names.is_leaf) : -1;
        /* x.detach() of an inference tensor has a version, and is one: torch refuses it below. */
        if (leaf >= 0 && !(leaf && is_inference(x))) {
            *entry = (gck_entry){GCK_VERSIONED, Py_NewRef(x), version, leaf, NULL, 0};
            return 0;
        }
        PyErr_Clear();
    }
    gck_entry_of_region++;
    saved = PyObject_CallFunctionObjArgs(py->make_saved_tensor, x, Py_False, NULL);
    gck_entry_of_region--;
    if (saved == NULL) {
        return -1;
    }
    *entry = (gck_entry){GCK_SAVED, saved, 0, 0, NULL, 0};
    return 0;
}

/* 1, 0, or -1.  A type whose metaclass refuses to be hashed is no container. */
static int is_container(gck_py *py, PyObject *x)
{
    int known = PyDict_Contains(py->supported_nodes, (PyObject *)Py_TYPE(x));

    if (known < 0 && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        known = 0;
    }
    return known != 0 ? known : PyTuple_Check(x) && PyObject_HasAttrString(x, "_fields");
}

/* Pack the leaves of a container.  It is kept whole, by reference, unless a leaf became
 * a payload: 1 packed, 0 not, -1. */
static int pack_leaves(gck_packing *p, PyObject *leaves, PyObject *spec, gck_entry *entry, PyObject **forward)
{
    const Py_ssize_t n = PyList_Size(leaves);
    gck_entry tree = {GCK_TREE, NULL, 0, 0, calloc((size_t)n + 1, sizeof(gck_entry)), n};
    PyObject *fed = PyList_New(n);
    const int before = p->payloads;
    int result = -1;

    if (tree.leaves == NULL || fed == NULL) {
        PyErr_NoMemory();
        goto exit;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);              /* borrowed */
        PyObject *value = NULL;
        const int tensor = gck_is_tensor(&p->state->py, leaf);
        int packed = tensor > 0 ? pack_payload(p, leaf, &tree.leaves[i], &value) : tensor;
        if (packed < 0) {
            goto exit;
        }
        if (!packed) {
            tree.leaves[i] = (gck_entry){GCK_KEPT, Py_NewRef(leaf), 0, 0, NULL, 0};
            value = Py_NewRef(leaf);
        }
        PyList_SetItem(fed, i, value);                           /* takes it */
    }
    result = p->payloads > before;
    if (result == 1 && p->plan.replay) {
        *forward = PyObject_CallFunctionObjArgs(p->state->py.tree_unflatten, fed, spec, NULL);
        result = *forward == NULL ? -1 : 1;
    }

exit:
    Py_XDECREF(fed);
    if (result == 1) {
        tree.value = Py_NewRef(spec);
        *entry = tree;
    } else {
        gck_entry_clear(&tree);
    }
    return result;
}

static int pack_container(gck_packing *p, PyObject *x, gck_entry *entry, PyObject **forward)
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

int gck_entry_pack(gck_packing *p, PyObject *x, int positional, gck_entry *entry, PyObject **forward)
{
    gck_py *py = &p->state->py;
    const int tensor = gck_is_tensor(py, x);
    int packed = tensor < 0 ? -1 : 0;

    *forward = NULL;
    if (p->plan.codec != NULL && tensor > 0) {
        packed = pack_payload(p, x, entry, forward);
    } else if (p->plan.codec != NULL && tensor == 0) {
        const int container = is_container(py, x);
        packed = container > 0 ? pack_container(p, x, entry, forward) : container;
    }
    if (packed == 0) {
        if (tensor && positional) {
            packed = gck_entry_keep(p, x, entry);
        } else {
            *entry = (gck_entry){GCK_KEPT, Py_NewRef(x), 0, 0, NULL, 0};
        }
    }
    if (packed < 0) {
        Py_CLEAR(*forward);
        return -1;
    }
    if (*forward == NULL) {
        *forward = Py_NewRef(x);
    }
    return 0;
}

/* ---- the other way ---- */

static PyObject *restore_versioned(gck_state *state, const gck_entry *entry)
{
    const int64_t now = version_of(&state->py, entry->value);
    const int leaf = entry->leaf || now < 0 ? 0 : gck_attr_is_true(entry->value, state->py.names.is_leaf);

    if (now < 0 || leaf < 0) {
        return NULL;
    }
    if (leaf) {
        PyErr_SetString(PyExc_RuntimeError,
                        "Trying to use a saved tensor that has been detached in-place, i.e. with .detach_()."
                        "This is not supported, please use out-of-place `.detach()` instead");
        return NULL;
    }
    if (now != entry->version) {
        PyObject *raised = PyObject_CallMethod(state->py.shim, "raise_modified", "OL", entry->value,
                                               (long long)entry->version);
        Py_XDECREF(raised);
        return NULL;
    }
    return Py_NewRef(entry->value);
}

/* Containers are put together by code of the user, which may look at the values. */
static PyObject *restore_tree(gck_state *state, const gck_entry *entry, gck_batch *batch)
{
    PyObject *leaves = PyList_New(entry->nleaves);
    PyObject *tree = NULL;

    for (Py_ssize_t i = 0; leaves != NULL && i < entry->nleaves; i++) {
        PyObject *leaf = gck_entry_restore(state, &entry->leaves[i], batch);
        if (leaf == NULL) {
            Py_CLEAR(leaves);
        } else {
            PyList_SetItem(leaves, i, leaf);
        }
    }
    if (leaves != NULL && gck_batch_flush(batch) == 0) {
        tree = PyObject_CallFunctionObjArgs(state->py.tree_unflatten, leaves, entry->value, NULL);
    }
    Py_XDECREF(leaves);
    return tree;
}

PyObject *gck_entry_restore(gck_state *state, const gck_entry *entry, gck_batch *batch)
{
    switch (entry->kind) {
    case GCK_SAVED:     return PyObject_CallMethodObjArgs(entry->value, state->py.names.unpack, NULL);
    case GCK_VERSIONED: return restore_versioned(state, entry);
    case GCK_PAYLOAD:   return gck_payload_restore((gck_payload *)entry->value, batch);
    case GCK_TREE:      return restore_tree(state, entry, batch);
    default:            return Py_NewRef(entry->value);
    }
}

int gck_entry_traverse(gck_entry *entry, visitproc visit, void *arg)
{
    Py_VISIT(entry->value);
    for (Py_ssize_t i = 0; i < entry->nleaves; i++) {
        int result = gck_entry_traverse(&entry->leaves[i], visit, arg);
        if (result != 0) {
            return result;
        }
    }
    return 0;
}

void gck_entry_clear(gck_entry *entry)
{
    gck_entry old = *entry;                      /* publish empty first: clearing runs Python */

    *entry = (gck_entry){GCK_KEPT, NULL, 0, 0, NULL, 0};
    Py_XDECREF(old.value);
    for (Py_ssize_t i = 0; i < old.nleaves; i++) {
        if (old.leaves != NULL) {
            gck_entry_clear(&old.leaves[i]);
        }
    }
    free(old.leaves);
}
