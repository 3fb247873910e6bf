/* saved_tensor.c: heap type SavedTensor: one tensor that compress_saved() keeps between forward and
 * backward. */
#include "engine/saved/saved_tensor.h"

#include "torch/calls.h"
#include "engine/payload/payload_decode.h"
#include "engine/payload/payload_bytes.h"
#include "engine/payload/restored.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* ---- the list ---- */

static const char capsule_name[] = "gradckpt.waiting";

gck_saved_list *gck_saved_list_of(PyObject *waiting) { return PyCapsule_GetPointer(waiting, capsule_name); }

static void capsule_free(PyObject *capsule) { free(gck_saved_list_of(capsule)); }

PyObject *gck_saved_list_new(void)
{
    gck_saved_list *l = calloc(1, sizeof *l);
    PyObject *capsule = l != NULL ? PyCapsule_New(l, capsule_name, capsule_free) : PyErr_NoMemory();

    if (capsule == NULL) {
        free(l);
    }
    return capsule;
}

PyObject *gck_saved_list_of_thread(void)
{
    PyObject *thread = PyThreadState_GetDict();
    PyObject *capsule = thread != NULL ? PyDict_GetItemString(thread, capsule_name) : NULL;

    if (capsule != NULL || thread == NULL) {
        return Py_XNewRef(capsule);
    }
    return gck_method(thread, "setdefault", Py_BuildValue("(sN)", capsule_name, gck_saved_list_new()));
}

gck_saved_tensor *gck_saved_list_known(PyObject *waiting, int index)
{
    gck_saved_list *l = gck_saved_list_of(waiting);

    return index < l->n ? l->known[index] : NULL;
}

void gck_saved_list_forget(gck_saved_tensor *saved)
{
    gck_saved_list *l = saved->waiting != NULL ? gck_saved_list_of(saved->waiting) : NULL;

    for (int i = 0; l != NULL && i < l->n; i++) {
        if (l->known[i] == saved) {
            l->waits -= saved->hooks != NULL;
            memmove(&l->known[i], &l->known[i + 1], sizeof l->known[0] * (size_t)(--l->n - i));
        }
    }
    Py_CLEAR(saved->waiting);
}

/* ---- one of them ---- */

gck_saved_tensor *gck_saved_tensor_new(gck_state *state)
{
    gck_saved_tensor *self = (gck_saved_tensor *)PyType_GenericAlloc(state->SavedTensor, 0);

    if (self != NULL) {
        self->state = state;
        state->saved_alive++;
    }
    return self;
}

void gck_saved_form_clear(gck_saved_form *form)
{
    gck_packed_clear(&form->entry);
    Py_CLEAR(form->dtype);
    Py_CLEAR(form->rows);
    Py_CLEAR(form->view);
}

const gck_codec *gck_saved_form_codec(const gck_saved_form *form)
{
    return form->entry.kind == GCK_PACKED_PAYLOAD ? ((gck_payload *)form->entry.value)->codec : NULL;
}

void gck_saved_form_make_again(gck_saved_form *form, PyObject *function)
{
    GCK_CLEARED_BY(gck_saved_form_clear) gck_saved_form before = *form;

    *form = (gck_saved_form){.entry = {GCK_PACKED_OBJECT, Py_NewRef(function), 0, 0, NULL, 0}};
}

static void saved_dealloc(PyObject *op)
{
    gck_saved_tensor *self = (gck_saved_tensor *)op;

    gck_saved_list_forget(self);
    self->state->looked = --self->state->saved_alive > 0 ? self->state->looked : 0;
    self->state->stats.live_bytes -= self->waits;
    gck_saved_form_clear(&self->form);
    Py_XDECREF(self->hooks);
    Py_XDECREF(self->packer);
    gck_object_free(op);
}

static PyObject *saved_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<gradckpt saved tensor: %R>", ((gck_saved_tensor *)op)->form.entry.value);
}

static PyMemberDef saved_members[] = {
    {"value", T_OBJECT_EX, offsetof(gck_saved_tensor, form.entry.value), READONLY,
     "The Payload; the tensor, or torch's SavedTensor of it; or the function that makes it again."},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *restore(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return gck_saved_tensor_restore((gck_saved_tensor *)op);
}

static PyMethodDef saved_methods[] = {
    {"restore", restore, METH_NOARGS, "restore($self, /)\n--\n\nReturn the tensor, without history."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot saved_slots[] = {
    {Py_tp_dealloc, saved_dealloc},
    {Py_tp_repr, saved_repr},
    {Py_tp_members, saved_members},
    {Py_tp_methods, saved_methods},
    {Py_tp_doc, "A tensor that compress_saved() keeps."},
    {0, NULL},
};

PyType_Spec gck_saved_tensor_spec = {
    .name = "gradckpt._C.SavedTensor",
    .basicsize = sizeof(gck_saved_tensor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = saved_slots,
};

PyObject *gck_saved_form_view(const gck_saved_form *form, PyObject *whole)
{
    /* as_strided() counts from the storage, the form from the first value */
    GCK_SCOPED PyObject *first = PyObject_CallMethod(whole, "storage_offset", NULL);
    GCK_SCOPED PyObject *offset = first != NULL ? PyNumber_Add(first, PyTuple_GetItem(form->view, 2)) : NULL;
    return offset != NULL ? PyObject_CallMethod(whole, "as_strided", "OOO", PyTuple_GetItem(form->view, 0),
                                                PyTuple_GetItem(form->view, 1), offset) : NULL;
}

/* New reference: x divided by its sums along the dimension; rows of zeros stay. */
static PyObject *with_sum_1(PyObject *x, PyObject *dim)
{
    GCK_SCOPED PyObject *sums = PyObject_CallMethod(x, "sum", "OO", dim, Py_True);
    GCK_SCOPED PyObject *least = sums != NULL ? PyObject_CallMethod(sums, "clamp_min", "d", 1e-30) : NULL;
    return least != NULL ? PyObject_CallMethod(x, "div", "O", least) : NULL;
}

PyObject *gck_saved_tensor_restore(const gck_saved_tensor *self)
{
    /* A forward on another thread may give it another form meanwhile. */
    GCK_CLEARED_BY(gck_saved_form_clear)
    gck_saved_form form = {.dtype = Py_XNewRef(self->form.dtype), .rows = Py_XNewRef(self->form.rows),
                           .view = Py_XNewRef(self->form.view)};

    if (self->form.entry.kind == GCK_PACKED_OBJECT) {
        return PyObject_CallNoArgs(self->form.entry.value);
    }
    if (self->form.entry.kind != GCK_PACKED_PAYLOAD) {
        return gck_packed_restore(self->state, &self->form.entry, NULL, NULL);
    }
    GCK_SCOPED gck_payload *payload = (gck_payload *)Py_NewRef(self->form.entry.value);
    GCK_SCOPED PyObject *whole = gck_payload_revive(payload, NULL, NULL);
    GCK_SCOPED PyObject *x = whole == NULL ? NULL
        : form.view != NULL ? gck_saved_form_view(&form, whole)
        : form.dtype != NULL ? PyObject_CallMethodObjArgs(whole, self->state->py.names.to, form.dtype, NULL)
        : Py_NewRef(whole);
    return x != NULL && form.rows != NULL ? with_sum_1(x, form.rows) : gck_give(&x);
}
