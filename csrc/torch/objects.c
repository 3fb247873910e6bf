/* objects.c: the Python objects of torch that C calls, looked up once. */
#include "tensor.h"

static PyObject *import_attribute(const char *module, const char *attribute)
{
    PyObject *mod = PyImport_ImportModule(module);
    PyObject *value = NULL;

    if (mod != NULL) {
        value = PyObject_GetAttrString(mod, attribute);
        Py_DECREF(mod);
    }
    return value;
}

/* NULL without an exception when it is not there. */
static PyObject *import_optional(const char *module, const char *attribute)
{
    PyObject *value = import_attribute(module, attribute);

    if (value == NULL) {
        PyErr_Clear();
    }
    return value;
}

/* A capsule; early builds of torch 2.10 have the bare address under an older name. */
static int load_dlpack(gck_py *py)
{
    PyObject *capsule = PyObject_GetAttrString(py->Tensor, "__dlpack_c_exchange_api__");

    if (capsule == NULL) {
        PyErr_Clear();
        capsule = PyObject_GetAttrString(py->Tensor, "__c_dlpack_exchange_api__");
    }
    if (capsule == NULL) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ImportError, "gradckpt needs torch >= 2.10: this torch has no DLPack exchange table");
        return -1;
    }
    py->dlpack = PyLong_Check(capsule) ? PyLong_AsVoidPtr(capsule)
                                       : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (py->dlpack == NULL) {
        return -1;
    }
    if (py->dlpack->version.major != 1 || py->dlpack->dltensor_from_py_object_no_sync == NULL) {
        PyErr_SetString(PyExc_ImportError, "gradckpt: this torch has a DLPack exchange table of an unknown version");
        return -1;
    }
    return 0;
}

/* Methods of the autograd engine.  0 or -1. */
static int load_engine(gck_py *py)
{
    PyObject *variable = import_attribute("torch.autograd", "Variable");
    PyObject *engine = variable != NULL ? PyObject_GetAttrString(variable, "_execution_engine") : NULL;

    py->queue_callback = engine != NULL ? PyObject_GetAttrString(engine, "queue_callback") : NULL;
    py->run_backward = engine != NULL ? PyObject_GetAttrString(engine, "run_backward") : NULL;
    Py_XDECREF(variable);
    Py_XDECREF(engine);
    return py->queue_callback == NULL || py->run_backward == NULL ? -1 : 0;
}

/* The key `Negative` lies between autograd and the kernels; torch's fallback there passes on what
 * has no negation pending.  Without that fallback there is no key.  0 or -1. */
static int load_selective(gck_py *py)
{
    PyObject *fallback = import_optional("torch._C", "_dispatch_has_backend_fallback"), *taken = NULL;

    PyObject *ops = import_optional("torch", "ops"), *aten = ops ? PyObject_GetAttrString(ops, "aten") : NULL;
    PyObject *packet = aten != NULL ? PyObject_GetAttrString(aten, "_to_copy") : NULL;
    py->cast = packet != NULL ? PyObject_GetAttrString(packet, "default") : NULL;
    Py_XDECREF(ops);
    Py_XDECREF(aten);
    Py_XDECREF(packet);
    PyObject *tag = import_optional("torch", "Tag");
    py->draws = tag != NULL ? PyObject_GetAttrString(tag, "nondeterministic_seeded") : NULL;
    Py_XDECREF(tag);
    py->recompute_mark = PyUnicode_InternFromString("recomputed");
    py->consumed_mark = PyUnicode_InternFromString("consumed");
    py->prefer_recompute = PyObject_GetAttrString(py->CheckpointPolicy, "PREFER_RECOMPUTE");
    py->must_recompute = PyObject_GetAttrString(py->CheckpointPolicy, "MUST_RECOMPUTE");
    py->key_inplace = PyObject_CallFunction(py->parse_key, "s", "ADInplaceOrView");
    py->key = fallback != NULL ? PyObject_CallFunction(py->parse_key, "s", "Negative") : NULL;
    if (py->key != NULL) {
        taken = PyObject_CallFunctionObjArgs(fallback, py->key, NULL);
    }
    if (taken != Py_True) {                      /* no such key, or no fallback: modes do the work */
        PyErr_Clear();
        Py_CLEAR(py->key);
    }
    Py_XDECREF(fallback);
    Py_XDECREF(taken);
    return py->cast && py->draws && py->recompute_mark && py->consumed_mark && py->prefer_recompute && py->must_recompute && py->key_inplace
        ? 0 : -1;
}

/* On failure the caller clears what was loaded. */
int gck_py_load(gck_py *py)
{
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
    py->make_saved_tensor = import_optional("torch._C._autograd", "_make_saved_tensor");
    py->peek_functorch = import_optional("torch._C._functorch", "peek_interpreter_stack");
    if (load_engine(py) < 0 || load_dlpack(py) < 0 || gck_rng_load(&py->rng) < 0
        || load_selective(py) < 0) {
        return -1;
    }
    py->cpu_device = PyObject_CallFunction(py->device, "s", "cpu");
    py->as_non_leaf = PyObject_CallMethod(
        py->functions, "DelayedError", "si",
        "gradckpt: a backward inside a checkpointed region went past the region's compressed input; give "
        "torch.autograd.grad the inputs to stop at, or use compress=None for this region", 1);
    py->cpu = PyUnicode_InternFromString("cpu");
    return py->cpu_device == NULL || py->as_non_leaf == NULL || py->cpu == NULL ? -1 : 0;
}

int gck_py_traverse(gck_py *py, visitproc visit, void *arg)
{
#define OBJECT(field, module, attribute) Py_VISIT(py->field);
    GCK_PY_OBJECTS(OBJECT)
#undef OBJECT
#define OBJECT(field) Py_VISIT(py->field);
    GCK_PY_MADE(OBJECT)
#undef OBJECT
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
#define OBJECT(field) Py_CLEAR(py->field);
    GCK_PY_MADE(OBJECT)
#undef OBJECT
    gck_rng_clear(&py->rng);
}
