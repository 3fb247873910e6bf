/* restored.c: an argument of the recompute, made of what the forward kept. */
#include "engine/payload/restored.h"

#include "torch/calls.h"
#include "torch/input.h"
#include "engine/payload/argument_state.h"
#include "engine/payload/payload_decode.h"
#include "engine/payload/slices.h"

static PyObject *restore_versioned(gck_state *state, PyObject *x, int64_t version, int was_leaf)
{
    gck_input in = {.x = x};

    if (gck_input_read(&state->py, &in, GCK_FACT_VERSION | (was_leaf ? 0 : GCK_FACT_LEAF)) < 0) {
        return NULL;
    }
    if (in.leaf) {
        return PyErr_Format(PyExc_RuntimeError,
                            "Trying to use a saved tensor that has been detached in-place, i.e. with .detach_()."
                            "This is not supported, please use out-of-place `.detach()` instead");
    }
    if (in.version != version) {
        return PyObject_CallFunction(state->py.call.raise_modified, "OL", x, (long long)version);
    }
    return Py_NewRef(x);
}

/* The user's code assembles containers and may read the values. */
static PyObject *restore_tree(gck_state *state, const gck_packed *entry, gck_batch *batch, PyObject *inputs)
{
    GCK_SCOPED PyObject *leaves = PyList_New(0), *tree = NULL;

    for (Py_ssize_t i = 0; leaves != NULL && i < entry->nleaves; i++) {
        gck_add_item(&leaves, gck_packed_restore(state, &entry->leaves[i], batch, inputs));
    }
    if (leaves != NULL && gck_batch_flush(batch) == 0) {
        tree = PyObject_CallFunctionObjArgs(state->py.tree_unflatten, leaves, entry->value, NULL);
    }
    return tree == NULL || gck_container_state_give(&state->py, tree, entry->state) < 0 ? NULL : gck_give(&tree);
}

/* New reference: x without history, requiring grad when x does; it is also added to the list. */
static PyObject *as_input(const gck_py *py, PyObject *x, PyObject *inputs)
{
    GCK_SCOPED PyObject *copy = PyObject_CallMethodObjArgs(x, py->names.detach, NULL);
    GCK_SCOPED PyObject *grad = copy != NULL ? PyObject_GetAttr(x, py->names.requires_grad) : NULL;

    return grad == NULL || PyObject_SetAttr(copy, py->names.requires_grad, grad) < 0
        || gck_attributes_carry(py, x, copy) < 0 || PyList_Append(inputs, copy) < 0 ? NULL : gck_give(&copy);
}

/* New reference: the tensor of a payload with the attributes of the original. */
static PyObject *restore_one(gck_payload *payload, const gck_slice *slice, PyObject *attributes, gck_batch *batch)
{
    GCK_SCOPED PyObject *memory = gck_slice_memory(slice, payload, batch);
    GCK_SCOPED PyObject *x = memory == NULL && PyErr_Occurred() ? NULL : gck_payload_restore(payload, memory, batch);

    return x == NULL || gck_attributes_give(x, attributes) < 0 ? NULL : gck_give(&x);
}

/* New reference: the tensor that this payload gave before, or gives now, in the recompute that the
 * batch belongs to. */
static PyObject *restore_payload(gck_payload *payload, const gck_slice *slice, PyObject *attributes, gck_batch *batch,
                                 const PyObject *inputs)
{
    PyObject *x;

    if (!payload->again || inputs != NULL) {       /* faster: no other argument uses it */
        return restore_one(payload, slice, attributes, batch);
    }
    if (batch->made == NULL && (batch->made = PyDict_New()) == NULL) {
        return NULL;
    }
    x = Py_XNewRef(PyDict_GetItemWithError(batch->made, (PyObject *)payload));
    if (x == NULL && !PyErr_Occurred() && (x = restore_one(payload, slice, attributes, batch)) != NULL
        && PyDict_SetItem(batch->made, (PyObject *)payload, x) < 0) {
        Py_CLEAR(x);
    }
    return x;
}

PyObject *gck_packed_restore(gck_state *state, const gck_packed *entry, gck_batch *batch, PyObject *inputs)
{
    /* the code below may empty the entry */
    GCK_SCOPED PyObject *value = Py_NewRef(entry->value), *kept = Py_XNewRef(entry->state), *original = NULL, *x = NULL;
    const gck_slice slice = entry->slice;

    switch (entry->kind) {
    case GCK_PACKED_SAVED:
        original = Py_NewRef(batch != NULL && batch->exact && kept != NULL ? PyWeakref_GetObject(kept) : Py_None);
        x = original == Py_None ? PyObject_CallMethodObjArgs(value, state->py.names.unpack, NULL)
                                : restore_versioned(state, original, entry->version, entry->leaf);
        break;
    case GCK_PACKED_TENSOR:    x = restore_versioned(state, value, entry->version, entry->leaf); break;
    case GCK_PACKED_PAYLOAD:   x = restore_payload((gck_payload *)value, &slice, kept, batch, inputs); break;
    case GCK_PACKED_BY_NODE:   x = PyIter_Next(batch->saved); break;
    case GCK_PACKED_TREE:      return restore_tree(state, entry, batch, inputs);
    default:                   return gck_give(&value);
    }
    return inputs == NULL || x == NULL ? gck_give(&x) : as_input(&state->py, x, inputs);
}
