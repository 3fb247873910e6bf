/* autocast.c: what torch.autocast does for each device type, without its Python code. */
#include "torch/autocast.h"

#include "torch/calls.h"
#include "torch/error.h"

/* New reference: the dtype of autocast on the CPU. */
static PyObject *cpu_dtype(const gck_py *py)
{
    return PyObject_CallFunctionObjArgs(py->autocast_dtype, py->names.cpu, NULL);
}

/* New reference: that of the accelerator; NULL without an exception: there is none, or it has no autocast. */
static PyObject *device_dtype(const gck_py *py)
{
    PyObject *dtype = py->accelerator != Py_None
        ? PyObject_CallFunctionObjArgs(py->autocast_dtype, py->accelerator, NULL) : NULL;

    if (dtype == NULL && PyErr_Occurred()) {
        gck_clear_refusal();
    }
    return dtype;
}

/* New reference: (type, enabled, dtype) as it is now; *enabled: the second. */
static PyObject *look(const gck_py *py, PyObject *type, int *enabled)
{
    PyObject *dtype;

    *enabled = gck_is_true(PyObject_CallFunctionObjArgs(py->autocast_enabled, type, NULL));
    dtype = *enabled >= 0 ? PyObject_CallFunctionObjArgs(py->autocast_dtype, type, NULL) : NULL;
    return dtype == NULL ? NULL : Py_BuildValue("(OON)", type, *enabled ? Py_True : Py_False, dtype);
}

/* Does x equal one of these?  1, 0 or -1. */
static int is_one_of(PyObject *x, PyObject *first, PyObject *second)
{
    const int equal = PyObject_RichCompareBool(x, first, Py_EQ);
    return equal != 0 ? equal : PyObject_RichCompareBool(x, second, Py_EQ);
}

/* New reference: [(type, enabled, dtype), ...] of all types, or of those where it is on and of the CPU. */
static PyObject *look_at_all(const gck_py *py, int all)
{
    GCK_SCOPED PyObject *types = PyObject_CallNoArgs(py->autocast_types);
    PyObject *found = types != NULL ? PyList_New(0) : NULL;
    int enabled;

    for (Py_ssize_t i = 0; found != NULL && i < gck_items(types); i++) {
        PyObject *type = gck_item(types, i);
        GCK_SCOPED PyObject *one = look(py, type, &enabled);
        const int wanted = one == NULL ? -1 : all || enabled ? 1 : is_one_of(type, py->names.cpu, py->accelerator);
        if (wanted < 0 || (wanted && PyList_Append(found, one) < 0)) {
            Py_CLEAR(found);
        }
    }
    return found;
}

/* Dtype and cache flag also count while autocast is off: the region may switch it on. */
int gck_autocast_capture(const gck_py *py, gck_autocast *a)
{
    const int enabled = gck_ask(py->any_autocast);

    a->cache = enabled < 0 ? -1 : gck_ask(py->cache_enabled);
    if (a->cache < 0 || (a->cpu_dtype = cpu_dtype(py)) == NULL
        || ((a->device_dtype = device_dtype(py)) == NULL && PyErr_Occurred())) {
        return -1;
    }
    return enabled && (a->types = look_at_all(py, 0)) == NULL ? -1 : 0;
}

int gck_autocast_differs(const gck_py *py, const gck_autocast *a)
{
    const int enabled = a->types != NULL ? 1 : gck_ask(py->any_autocast);
    const int cache = enabled ? enabled : gck_ask(py->cache_enabled);
    GCK_SCOPED PyObject *own = NULL, *devices = NULL;

    if (enabled != 0 || cache < 0) {
        return enabled != 0 ? enabled : -1;
    }
    return (own = cpu_dtype(py)) == NULL || ((devices = device_dtype(py)) == NULL && PyErr_Occurred())
         ? -1 : cache != a->cache || own != a->cpu_dtype || devices != a->device_dtype;
}

/* Append the call; args is taken over, NULL: making it raised.  0 or -1. */
static int plan(PyObject *calls, PyObject *builtin, PyObject *args)
{
    return args == NULL ? -1 : gck_append(calls, Py_BuildValue("(ON)", builtin, args));
}

/* *one, borrowed: what `types` says of this one, or NULL.  0 or -1. */
static int of_type(PyObject *types, PyObject *type, PyObject **one)
{
    int equal = 0;

    for (Py_ssize_t i = 0; equal == 0 && types != NULL && i < gck_items(types); i++) {
        equal = PyObject_RichCompareBool(PyTuple_GetItem(*one = gck_item(types, i), 0), type, Py_EQ);
    }
    if (equal <= 0) {
        *one = NULL;
    }
    return equal < 0 ? -1 : 0;
}

/* One device type: on as it was, or off.  0 or -1. */
static int plan_type(const gck_py *py, PyObject *was, PyObject *now, PyObject *enter, PyObject *leave)
{
    PyObject *type = PyTuple_GetItem(now, 0);
    PyObject *enabled = was != NULL ? PyTuple_GetItem(was, 1) : Py_False;
    PyObject *dtype = PyTuple_GetItem(was != NULL ? was : now, 2);

    return plan(enter, py->set_autocast_enabled, PyTuple_Pack(2, type, enabled)) < 0
        || plan(enter, py->set_autocast_dtype, PyTuple_Pack(2, type, dtype)) < 0
        || plan(leave, py->set_autocast_enabled, PyTuple_Pack(2, type, PyTuple_GetItem(now, 1))) < 0
        || plan(leave, py->set_autocast_dtype, PyTuple_Pack(2, type, PyTuple_GetItem(now, 2))) < 0 ? -1 : 0;
}

int gck_autocast_plan(const gck_py *py, const gck_autocast *a, PyObject *enter, PyObject *leave)
{
    GCK_SCOPED PyObject *then = a->types != NULL ? Py_NewRef(a->types)
        : a->device_dtype == NULL ? Py_BuildValue("[(OOO)]", py->names.cpu, Py_False, a->cpu_dtype)
        : Py_BuildValue("[(OOO)(OOO)]", py->names.cpu, Py_False, a->cpu_dtype, py->accelerator, Py_False,
                        a->device_dtype);
    GCK_SCOPED PyObject *now = then != NULL ? look_at_all(py, 1) : NULL;
    const int cache = now != NULL ? gck_ask(py->cache_enabled) : -1;
    int around = 0;
    int status = cache < 0 || plan(enter, py->autocast_increment, PyTuple_New(0)) < 0
              || plan(enter, py->set_autocast_cache, PyTuple_Pack(1, a->cache ? Py_True : Py_False)) < 0
              || plan(leave, py->autocast_decrement, PyTuple_New(0)) < 0 ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < gck_items(now); i++) {
        PyObject *one = gck_item(now, i), *was = NULL;
        const int enabled = PyTuple_GetItem(one, 1) == Py_True;
        around |= enabled;
        status = of_type(then, PyTuple_GetItem(one, 0), &was) < 0 ? -1
               : was != NULL || enabled ? plan_type(py, was, one, enter, leave) : 0;
    }
    if (status < 0 || plan(leave, py->set_autocast_cache, PyTuple_Pack(1, cache ? Py_True : Py_False)) < 0) {
        return -1;
    }
    /* the outermost autocast does the same when it ends */
    return around ? 0 : plan(leave, py->clear_autocast_cache, PyTuple_New(0));
}
