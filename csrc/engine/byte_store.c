/* byte_store.c: two thin types around csrc/offload/store.h.  Memory is named by its address: the callers in Python hold
 * the tensors, and other threads run meanwhile. */
#include "engine/byte_store.h"

#include "offload/store.h"

#include <errno.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    gck_byte_store *store;
    PyObject       *weakrefs;
} byte_store;

typedef struct {
    PyObject_HEAD
    PyObject            *owner;           /* the ByteStore */
    gck_byte_store_item *stored;
} stored_bytes;

/* ---- StoredBytes ---- */

static void stored_dealloc(PyObject *op)
{
    stored_bytes *self = (stored_bytes *)op;
    PyTypeObject *type = Py_TYPE(op);

    if (self->stored != NULL) {
        gck_byte_store_drop(self->stored);
    }
    Py_XDECREF(self->owner);
    PyObject_Free(op);
    Py_DECREF((PyObject *)type);
}

static PyObject *stored_get(PyObject *op, PyObject *args)
{
    unsigned long long address;
    int status;

    if (!PyArg_ParseTuple(args, "K:get", &address)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = gck_byte_store_get(((stored_bytes *)op)->stored, (void *)(uintptr_t)address);
    Py_END_ALLOW_THREADS
    if (status == 0) {
        return Py_NewRef(Py_None);
    }
    PyErr_Format(PyExc_RuntimeError, "gradckpt: %lld bytes that were offloaded to a disk cannot be read: %s; gradients "
                 "of this step cannot be computed, so run it again",
                 (long long)gck_byte_store_item_nbytes(((stored_bytes *)op)->stored), gck_byte_store_text(status));
    return NULL;
}

static PyMethodDef stored_methods[] = {
    {"get", stored_get, METH_VARARGS, "get($self, address, /)\n--\n\nCopy the bytes to this address."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot stored_slots[] = {
    {Py_tp_dealloc, stored_dealloc},
    {Py_tp_methods, stored_methods},
    {Py_tp_doc, "Bytes in a ByteStore."},
    {0, NULL},
};

static PyType_Spec stored_spec = {
    .name = "gradckpt._C.StoredBytes",
    .basicsize = sizeof(stored_bytes),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = stored_slots,
};

/* ---- ByteStore ---- */

static void store_dealloc(PyObject *op)
{
    byte_store *self = (byte_store *)op;
    PyTypeObject *type = Py_TYPE(op);

    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    if (self->store != NULL) {
        Py_BEGIN_ALLOW_THREADS                   /* its threads end */
        gck_byte_store_free(self->store);
        Py_END_ALLOW_THREADS
    }
    PyObject_Free(op);
    Py_DECREF((PyObject *)type);
}

/* Raise what keeps a store from being made; NULL. */
static PyObject *cannot_be_made(const char *directory, int status)
{
    if (status == GCK_STORE_NO_MEMORY || status == ENOMEM) {
        PyErr_SetString(PyExc_MemoryError,
                        "gradckpt: offload='disk' finds no memory for its budget; lower host_budget");
        return NULL;
    }
    PyErr_Format(PyExc_ValueError, "gradckpt: offload='disk' cannot use the directory %s: %s; pass another one, as "
                 "in gradckpt.Offload('disk', directory='/scratch')", directory,
                 status == EINVAL || status == EOPNOTSUPP ? "its file system has no O_DIRECT"
                                                           : gck_byte_store_text(status));
    return NULL;
}

static PyObject *store_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static const char *const names[] = {"directory", "memory", "prefetch", NULL};
    gck_byte_store_options options = {.threads = 2, .prefetch = 2};
    PyObject *path = NULL;
    long long memory;
    byte_store *self;
    int status;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&L|i:ByteStore", (char **)names, PyUnicode_FSConverter, &path,
                                     &memory, &options.prefetch)) {
        return NULL;
    }
    if (memory < GCK_FILE_ALIGNMENT) {
        PyErr_Format(PyExc_ValueError, "gradckpt: a store has %lld bytes of memory; pass 4096 or more", memory);
        Py_DECREF(path);
        return NULL;
    }
    options.memory = memory;
    options.directory = PyBytes_AsString(path);
    self = (byte_store *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        Py_BEGIN_ALLOW_THREADS
        status = gck_byte_store_new(&options, &self->store);
        Py_END_ALLOW_THREADS
        if (status != 0) {
            cannot_be_made(options.directory, status);
            Py_DECREF((PyObject *)self);
            self = NULL;
        }
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

static PyObject *store_put(PyObject *op, PyObject *args)
{
    const gck_state *state = PyType_GetModuleState(Py_TYPE(op));
    unsigned long long address;
    long long nbytes;
    stored_bytes *made;
    int status;

    if (state == NULL || !PyArg_ParseTuple(args, "KL:put", &address, &nbytes)
        || (made = (stored_bytes *)PyType_GenericAlloc(state->StoredBytes, 0)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = gck_byte_store_put(((byte_store *)op)->store, (const void *)(uintptr_t)address, nbytes, &made->stored);
    Py_END_ALLOW_THREADS
    if (status == 0) {
        made->owner = Py_NewRef(op);
        return (PyObject *)made;
    }
    Py_DECREF((PyObject *)made);
    return PyUnicode_FromString(gck_byte_store_text(status));
}

static PyObject *store_figures(PyObject *op, PyObject *unused)
{
    gck_byte_store_figures f;

    (void)unused;
    gck_byte_store_read_figures(((byte_store *)op)->store, &f);
    return Py_BuildValue("{sL sL sL sL sL sL sL sL sL sL sL sL}", "memory", (long long)f.memory, "memory_used",
                         (long long)f.memory_used, "memory_peak", (long long)f.memory_peak, "file_used",
                         (long long)f.file_used, "file_peak", (long long)f.file_peak, "written", (long long)f.written,
                         "read", (long long)f.read, "puts", (long long)f.puts, "gets", (long long)f.gets, "from_memory",
                         (long long)f.from_memory, "waits_put", (long long)f.waits_put, "waits_get",
                         (long long)f.waits_get);
}

static PyMethodDef store_methods[] = {
    {"put", store_put, METH_VARARGS,
     "put($self, address, nbytes, /)\n--\n\nCopy bytes into it: StoredBytes, or a str that says why not."},
    {"figures", store_figures, METH_NOARGS, "figures($self, /)\n--\n\nReturn bytes and calls so far."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef store_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(byte_store, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot store_slots[] = {
    {Py_tp_members, store_members},
    {Py_tp_new, store_new},
    {Py_tp_dealloc, store_dealloc},
    {Py_tp_methods, store_methods},
    {Py_tp_doc, "ByteStore(directory, memory, prefetch=2)\n--\n\n"
                "Bytes in host memory, and in a file without a name when there are more."},
    {0, NULL},
};

static PyType_Spec store_spec = {
    .name = "gradckpt._C.ByteStore",
    .basicsize = sizeof(byte_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = store_slots,
};

int gck_byte_store_types(PyObject *module, gck_state *state)
{
    PyObject *store = PyType_FromModuleAndSpec(module, &store_spec, NULL);
    PyObject *stored = store != NULL ? PyType_FromModuleAndSpec(module, &stored_spec, NULL) : NULL;
    const int status = stored == NULL || PyModule_AddType(module, (PyTypeObject *)store) < 0
                    || PyModule_AddType(module, (PyTypeObject *)stored) < 0 ? -1 : 0;

    Py_XDECREF(store);
    state->StoredBytes = (PyTypeObject *)stored;
    return status;
}
