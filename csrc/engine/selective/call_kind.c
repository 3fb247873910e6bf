/* call_kind.c: what tells one call of an operator from another.
 *
 * Read for each caught call of both runs: about 0.1 us for a tensor.  An operand that one run can
 * show and the other cannot would make one call two, so tensor subclasses count as tensors only. */
#include "engine/selective/call_kind.h"

#include "torch/calls.h"
#include "torch/input.h"

#include <string.h>

enum { DEEPEST_LIST = 8 };         /* lists of operands nest once or twice */
enum { TENSOR = 1, NUMBER, TRUTH, FLOATING, NOTHING, TEXT, SEQUENCE, CONSTANT, OTHER };

static int mix_tensor(const gck_py *py, const gck_run *run, gck_call_kind *kind, PyObject *x)
{
    gck_dl_tensor dl;
    const int shown = gck_read_dlpack(py, x, &dl);
    uint64_t hash = kind->call;

    kind->given = gck_mix(kind->given, gck_arguments_that_are(run, x));
    if (shown <= 0) {
        kind->call = gck_mix(hash, TENSOR);
        return shown;
    }
    hash = gck_mix(hash, (uint64_t)dl.dtype.code << 32 | (uint64_t)dl.dtype.bits << 24 | dl.dtype.lanes);
    hash = gck_mix(hash, (uint64_t)(uint32_t)dl.device.device_type << 32 | (uint32_t)dl.device.device_id);
    hash = gck_mix(hash, (uint64_t)dl.ndim);
    for (int d = 0; d < dl.ndim; d++) {
        hash = gck_mix(hash, (uint64_t)dl.shape[d]);
    }
    kind->call = hash;
    kind->strides = gck_mix_strides(kind->strides, &dl);
    return 0;
}

static void mix_double(gck_call_kind *kind, double x)
{
    uint64_t bits;

    memcpy(&bits, &x, sizeof bits);
    kind->floats = gck_mix(kind->floats, bits);
}

static int mix_operand(const gck_py *py, const gck_run *run, gck_call_kind *kind, PyObject *x, int depth)
{
    PyTypeObject *type = Py_TYPE(x);
    uint64_t tag = OTHER, value = (uint64_t)(uintptr_t)type;

    if (gck_is_plain_tensor(py, x)) {
        return mix_tensor(py, run, kind, x);
    }
    if (PyBool_Check(x) || x == Py_None) {
        tag = x == Py_None ? NOTHING : TRUTH;
        value = x == Py_True;
    } else if (PyLong_Check(x)) {
        int overflow;
        tag = NUMBER;
        value = (uint64_t)PyLong_AsLongLongAndOverflow(x, &overflow);
    } else if (PyFloat_Check(x) || PyComplex_Check(x)) {
        tag = FLOATING;
        value = (uint64_t)PyComplex_Check(x);
        mix_double(kind, PyComplex_Check(x) ? PyComplex_RealAsDouble(x) : PyFloat_AsDouble(x));
        mix_double(kind, PyComplex_Check(x) ? PyComplex_ImagAsDouble(x) : 0);
    } else if (PyTuple_Check(x) || PyList_Check(x)) {
        const Py_ssize_t n = gck_items(x);
        int status = 0;
        kind->call = gck_mix(gck_mix(kind->call, SEQUENCE), (uint64_t)n);
        for (Py_ssize_t i = 0; status == 0 && depth < DEEPEST_LIST && i < n; i++) {
            status = mix_operand(py, run, kind, gck_item(x, i), depth + 1);
        }
        return status;
    } else if (PyUnicode_CheckExact(x)) {
        tag = TEXT;
        value = (uint64_t)PyObject_Hash(x);
    } else if (type == Py_TYPE(py->float32) || type == Py_TYPE(py->strided) || type == Py_TYPE(py->preserve_format)
               || type == Py_TYPE(py->cpu_device)) {
        tag = CONSTANT;
        value = (uint64_t)PyObject_Hash(x);
    } else if (PyType_IsSubtype(type, (PyTypeObject *)py->Tensor)) {
        tag = TENSOR;                            /* regardless of its class */
        value = 0;
    }
    kind->call = gck_mix(gck_mix(kind->call, tag), value);
    return PyErr_Occurred() ? -1 : 0;
}

int gck_call_kind_of(const gck_py *py, const gck_run *run, uint64_t op, PyObject *args, PyObject *kwargs,
                     gck_call_kind *kind)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    int status = 0;

    *kind = (gck_call_kind){.call = gck_mix(1, op)};
    for (Py_ssize_t i = 0; status == 0 && i < PyTuple_Size(args); i++) {
        status = mix_operand(py, run, kind, PyTuple_GetItem(args, i), 0);
    }
    while (status == 0 && kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value)) {
        status = mix_operand(py, run, kind, name, 0) < 0 ? -1 : mix_operand(py, run, kind, value, 0);
    }
    return status;
}
