/* objects.c: the Python objects of torch that C calls, each looked up once. */
#include "torch/objects.h"

#include "torch/calls.h"

static PyObject *import_attribute(const char *module, const char *attribute)
{
    GCK_SCOPED PyObject *from = PyImport_ImportModule(module);
    return from != NULL ? PyObject_GetAttrString(from, attribute) : NULL;
}

/* 0 or -1. */
static int load_dlpack(gck_py *py)
{
    GCK_SCOPED PyObject *table = import_attribute("gradckpt._engine.torch_objects", "dlpack");

    py->dlpack = table != NULL ? PyCapsule_GetPointer(table, "dlpack_exchange_api") : NULL;
    if (py->dlpack != NULL
        && (py->dlpack->version.major != 1 || py->dlpack->dltensor_from_py_object_no_sync == NULL)) {
        PyErr_SetString(PyExc_ImportError, "gradckpt: this torch has a DLPack exchange table of an unknown version; "
                                           "update gradckpt");
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* On failure the caller clears what was loaded. */
int gck_py_load(gck_py *py)
{
#define CALLBACK(name) py->call.name = Py_NewRef(Py_None);   /* until bind() */
    GCK_PY_CALLBACKS(CALLBACK)
#undef CALLBACK
#define OBJECT(field, module, attribute)                                   \
    if ((py->field = import_attribute(module, attribute)) == NULL) {       \
        return -1;                                                         \
    }
    GCK_PY_OBJECTS(OBJECT)
#undef OBJECT
#define NAME(name)                                                         \
    if ((py->names.name = PyUnicode_InternFromString(#name)) == NULL) {    \
        return -1;                                                         \
    }
    GCK_PY_NAMES(NAME)
#undef NAME
    py->adopt_copies = gck_is_true(import_attribute("gradckpt._engine.torch_objects", "adopt_copies"));
    return py->adopt_copies < 0 || load_dlpack(py) < 0 ? -1 : gck_rng_load(&py->rng);
}

static int bind_one(PyObject **callback, PyObject *table, const char *name)
{
    PyObject *found = PyMapping_GetItemString(table, name);

    if (found == NULL) {
        return -1;
    }
    GCK_SCOPED PyObject *before = *callback;
    *callback = found;
    return 0;
}

int gck_py_bind(gck_py *py, PyObject *table)
{
#define CALLBACK(name)                                                     \
    if (bind_one(&py->call.name, table, #name) < 0) {                      \
        return -1;                                                         \
    }
    GCK_PY_CALLBACKS(CALLBACK)
#undef CALLBACK
    return 0;
}

int gck_py_traverse(gck_py *py, visitproc visit, void *arg)
{
#define OBJECT(field, module, attribute) Py_VISIT(py->field);
    GCK_PY_OBJECTS(OBJECT)
#undef OBJECT
#define CALLBACK(name) Py_VISIT(py->call.name);
    GCK_PY_CALLBACKS(CALLBACK)
#undef CALLBACK
    Py_VISIT(py->ignored);
    return gck_rng_traverse(&py->rng, visit, arg);
}

void gck_py_clear(gck_py *py)
{
#define OBJECT(field, module, attribute) Py_CLEAR(py->field);
    GCK_PY_OBJECTS(OBJECT)
#undef OBJECT
#define NAME(name) Py_CLEAR(py->names.name);
    GCK_PY_NAMES(NAME)
#undef NAME
#define CALLBACK(name) Py_CLEAR(py->call.name);
    GCK_PY_CALLBACKS(CALLBACK)
#undef CALLBACK
    Py_CLEAR(py->ignored);
    gck_rng_clear(&py->rng);
}

int gck_raise_torchs(const gck_py *py, const char *kind)
{
    Py_XDECREF(PyObject_CallFunction(py->call.raise_torchs, "s", kind));
    return -1;
}

/* ---- autograd's nodes ---- */

int64_t gck_last_node_number(const gck_py *py)
{
    const int64_t next = gck_as_int64(PyObject_CallNoArgs(py->next_node_number));

    return PyErr_Occurred() ? -1 : next - 1;
}

int64_t gck_node_number(const gck_py *py, PyObject *node)
{
    GCK_SCOPED PyObject *value = PyObject_CallMethodObjArgs(node, py->names._sequence_nr, NULL);
    const uint64_t number = value != NULL ? PyLong_AsUnsignedLongLong(value) : 0;

    return PyErr_Occurred() ? -1 : number > INT64_MAX ? INT64_MAX : (int64_t)number;
}
