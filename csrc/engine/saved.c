/* saved.c: heap type Saved: one tensor as compress_saved() keeps it between forward and backward. */
#include "saved.h"

#include "waiting.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

gck_saved *gck_saved_new(gck_state *state)
{
    gck_saved *self = PyObject_New(gck_saved, state->Saved);

    if (self != NULL) {
        memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
        self->state = state;
        self->ndim = -1;
    }
    return self;
}

void gck_saved_swap(gck_saved *a, gck_saved *b)
{
    const gck_saved old = *a;

#define SWAP(field) (a->field = b->field, b->field = old.field)
    SWAP(entry), SWAP(role), SWAP(dtype), SWAP(ndim), SWAP(offset), SWAP(geometry);
#undef SWAP
}

static void saved_dealloc(PyObject *op)
{
    gck_saved *self = (gck_saved *)op;
    PyTypeObject *type = Py_TYPE(op);

    if (self->waiting != NULL) {
        gck_waiting_forget(self);
    }
    if (self->saver != NULL) {
        self->state->stats.live_bytes -= self->waits;
    }
    gck_entry_clear(&self->entry);
    Py_XDECREF(self->saver);
    Py_XDECREF(self->node);
    Py_XDECREF(self->dtype);
    free(self->geometry);
    PyObject_Free(op);
    Py_DECREF(type);
}

static PyObject *saved_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<gradckpt saved tensor: %R>", ((gck_saved *)op)->entry.value);
}

static PyMemberDef saved_members[] = {
    {"value", T_OBJECT_EX, offsetof(gck_saved, entry.value), READONLY, "The Payload; or the tensor, or torch's SavedTensor of it."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot saved_slots[] = {
    {Py_tp_dealloc, saved_dealloc},
    {Py_tp_repr, saved_repr},
    {Py_tp_members, saved_members},
    {Py_tp_doc, "What compress_saved() keeps of one tensor."},
    {0, NULL},
};

PyType_Spec gck_saved_spec = {
    .name = "gradckpt._C.Saved",
    .basicsize = sizeof(gck_saved),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = saved_slots,
};

PyObject *gck_saved_view(const gck_saved *self, PyObject *whole)
{
    PyObject *sizes = PyTuple_New(self->ndim), *strides = PyTuple_New(self->ndim), *view = NULL;

    for (int d = 0; sizes != NULL && strides != NULL && d < self->ndim; d++) {
        PyTuple_SetItem(sizes, d, PyLong_FromLongLong(self->geometry[d]));
        PyTuple_SetItem(strides, d, PyLong_FromLongLong(self->geometry[self->ndim + d]));
    }
    if (sizes != NULL && strides != NULL && !PyErr_Occurred()) {
        view = PyObject_CallMethod(whole, "as_strided", "OOL", sizes, strides, (long long)self->offset);
    }
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    return view;
}

/* New reference: 1 where the mask says so and 0 elsewhere.  A POSITIVE_OR_NAN one says where not. */
static PyObject *signs_of(const gck_saved *self, PyObject *mask)
{
    PyObject *positive = self->role == GCK_ROLE_POSITIVE ? Py_NewRef(mask) : PyObject_CallMethod(mask, "logical_not", NULL);
    PyObject *signs = positive != NULL ? PyObject_CallMethod(positive, "to", "O", self->dtype) : NULL;

    Py_XDECREF(positive);
    return signs;
}

PyObject *gck_saved_restore(const gck_saved *self)
{
    PyObject *whole, *x;

    if (self->entry.kind != GCK_PAYLOAD) {
        return gck_entry_restore(self->state, &self->entry, NULL, NULL);
    }
    whole = gck_payload_revive((gck_payload *)self->entry.value);
    if (whole == NULL || (self->dtype == NULL && self->ndim < 0)) {
        return whole;
    }
    x = self->dtype != NULL ? signs_of(self, whole) : gck_saved_view(self, whole);
    Py_DECREF(whole);
    return x;
}

int gck_saved_describe(gck_saved *to, const gck_tensor *x, int64_t offset)
{
    int64_t step = 1;

    to->geometry = malloc(sizeof(int64_t) * (size_t)(2 * x->ndim + 1));
    if (to->geometry == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    to->ndim = x->ndim;
    to->offset = offset;
    for (int d = x->ndim - 1; d >= 0; d--) {
        to->geometry[d] = x->sizes[d];
        to->geometry[x->ndim + d] = x->strides != NULL ? x->strides[d] : step;
        step *= x->sizes[d];
    }
    return 0;
}
