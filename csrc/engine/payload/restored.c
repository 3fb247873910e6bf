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
    PyObject *leaves = PyList_New(0), *tree = NULL;
    int status = leaves == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < entry->nleaves; i++) {
        status = gck_append(leaves, gck_packed_restore(state, &entry->leaves[i], batch, inputs));
    }
    if (status == 0 && gck_batch_flush(batch) == 0) {
        tree = PyObject_CallFunctionObjArgs(state->py.tree_unflatten, leaves, entry->value, NULL);
    }
    if (tree != NULL && gck_container_state_give(&state->py, tree, entry->state) < 0) {
        Py_CLEAR(tree);
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

    if (grad == NULL || PyObject_SetAttr(copy, py->names.requires_grad, grad) < 0
        || gck_attributes_carry(py, x, copy) < 0 || PyList_Append(inputs, copy) < 0) {
        Py_CLEAR(copy);
    }
    Py_XDECREF(x);
    Py_XDECREF(grad);
    return copy;
}

/* New reference: the tensor of a payload with the attributes of the original. */
static PyObject *restore_one(gck_payload *payload, const gck_slice *slice, PyObject *attributes, gck_batch *batch)
{
    PyObject *memory = gck_slice_memory(slice, payload, batch), *x = NULL;

    if (memory != NULL || !PyErr_Occurred()) {
        x = gck_payload_restore(payload, memory, batch);
    }
    if (x != NULL && gck_attributes_give(x, attributes) < 0) {
        Py_CLEAR(x);
    }
    Py_XDECREF(memory);
    return x;
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
    PyObject *value = Py_NewRef(entry->value), *attributes, *x;      /* the code below may empty the entry */
    const gck_slice slice = entry->slice;

    switch (entry->kind) {
    case GCK_PACKED_SAVED:
        x = batch != NULL && batch->exact && entry->state != NULL ? PyWeakref_GetObject(entry->state) : Py_None;
        x = x == Py_None ? PyObject_CallMethodObjArgs(value, state->py.names.unpack, NULL)
                         : restore_versioned(state, x, entry->version, entry->leaf);
        break;
    case GCK_PACKED_TENSOR: x = restore_versioned(state, value, entry->version, entry->leaf); break;
    case GCK_PACKED_PAYLOAD:
        attributes = Py_XNewRef(entry->state);
        x = restore_payload((gck_payload *)value, &slice, attributes, batch, inputs);
        Py_XDECREF(attributes);
        break;
    case GCK_PACKED_BY_NODE:   x = PyIter_Next(batch->saved); break;
    case GCK_PACKED_TREE:      x = restore_tree(state, entry, batch, inputs); inputs = NULL; break;
    default:            return value;
    }
    Py_DECREF(value);
    return inputs == NULL ? x : as_input(&state->py, x, inputs);
}
