/* tensor.c: modes, hooks, empty tensors, and the work of the codecs on them. */
#include "torch/tensor.h"

#include "torch/abi.h"
#include "torch/calls.h"
#include "torch/device.h"
#include "torch/error.h"
#include "torch/simulated.h"

const char *const gck_reason_text[GCK_NREASONS] = {
    "compressed",
#define REASON(name, text) text,
    GCK_REASONS(REASON)
#undef REASON
};

enum { GIL_RELEASE_NUMEL = 65536 };    /* below, releasing costs more than it frees */

int gck_is_tensor(const gck_py *py, PyObject *x)
{
    return gck_is_plain_tensor(py, x) ? 1 : PyObject_IsInstance(x, py->Tensor);
}

int gck_hooks_push(const gck_py *py, PyObject *pack, PyMethodDef *unpack_def, PyObject *self)
{
    GCK_SCOPED PyObject *own = pack, *unpack = own != NULL ? PyCFunction_New(unpack_def, self) : NULL;

    return unpack == NULL ? -1 : gck_done(PyObject_CallFunctionObjArgs(py->push_hooks, own, unpack, NULL));
}

void gck_hooks_pop(const gck_py *py)
{
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();

    if (gck_done(PyObject_CallNoArgs(py->pop_hooks)) < 0) {
        PyErr_WriteUnraisable(py->pop_hooks);    /* other code popped our hooks: nothing is left to undo */
    }
}

int gck_functorch_active(const gck_py *py)
{
    GCK_SCOPED PyObject *level = PyObject_CallNoArgs(py->peek_functorch);
    return level == NULL ? -1 : level != Py_None;
}

int gck_modes_that_watch(const gck_py *py) { return gck_is_simulated() ? 0 : gck_ask(py->dispatch_stack_len); }

int gck_tracing_modes(const gck_py *py)
{
    const int modes = gck_ask(py->dispatch_stack_len);

    return modes <= 0 ? modes : gck_is_true(PyObject_CallFunction(py->call.tracing_mode_active, NULL));
}

int gck_tracing(const gck_py *py)
{
    const int tracing = gck_tracing_modes(py);

    return tracing != 0 ? tracing : gck_functorch_active(py);
}

PyObject *gck_dtype_object(const gck_py *py, gck_dtype dtype)
{
    PyObject *const objects[GCK_NDTYPES] = {py->float32, py->float16, py->bfloat16, py->boolean};

    return objects[dtype];
}

PyObject *gck_device_object(const gck_py *py, int device)
{
    return device < 0 ? Py_NewRef(py->cpu_device)
         : PyObject_CallFunction(py->device, "si", gck_device_kind_at(gck_device_kind_of(device))->name,
                                 gck_device_index(device));
}

/* New reference: torch.empty(*args) of this dtype there.  Takes over args, which may be NULL. */
static PyObject *empty(const gck_py *py, PyObject *function, PyObject *args, PyObject *dtype, int device)
{
    GCK_SCOPED PyObject *own = args;
    GCK_SCOPED PyObject *kwargs = own == NULL ? NULL
                                : Py_BuildValue("{OOON}", py->names.dtype, dtype, py->names.device,
                                                gck_device_object(py, device));

    return kwargs != NULL ? PyObject_Call(function, own, kwargs) : NULL;
}

PyObject *gck_bytes_empty(const gck_py *py, int64_t nbytes, int device)
{
    return empty(py, py->empty, Py_BuildValue("(L)", (long long)nbytes), py->uint8, device);
}

PyObject *gck_sizes(int n, const int64_t *values)
{
    PyObject *tuple = PyTuple_New(n);

    for (int i = 0; tuple != NULL && i < n; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SetItem(tuple, i, value);
        }
    }
    return tuple;
}

PyObject *gck_empty(const gck_py *py, int ndim, const int64_t *sizes, const int64_t *strides, gck_dtype dtype,
                    int device)
{
    PyObject *shape = gck_sizes(ndim, sizes);
    /* faster: empty(2, 3) is parsed in half the time of empty((2, 3)) */
    PyObject *args = strides == NULL ? ndim > 0 ? shape : Py_BuildValue("(N)", shape)
                                     : Py_BuildValue("(NN)", shape, gck_sizes(ndim, strides));

    return empty(py, strides != NULL ? py->empty_strided : py->empty, args, gck_dtype_object(py, dtype), device);
}

/* Raise what a codec returned; -1. */
static int raise_of(const gck_codec *codec, int decode, int device, int status)
{
    GCK_SCOPED PyObject *torch = status == GCK_CUDA_OUT_OF_MEMORY ? PyImport_ImportModule("torch") : NULL;
    GCK_SCOPED PyObject *class = torch != NULL ? PyObject_GetAttrString(torch, "OutOfMemoryError") : NULL;

    PyErr_Clear();
    return gck_done(PyErr_Format(
        class != NULL ? class : PyExc_RuntimeError, "gradckpt: codec '%s' could not %s: %s", codec->name,
        decode ? "decode" : "encode", gck_device_error(device, status)));
}

/* Check once, at the first tensor of a kind of device, that its driver supports the runtime we were built with. */
static int check_device(gck_py *py, const gck_codec *codec, int kind, int decode)
{
    int driver, runtime;
    const int status = gck_device_kind_at(kind)->check(&driver, &runtime);

    if (status == GCK_OK) {
        py->checked |= 1u << kind;
        return 0;
    }
    if (status > 0) {
        return raise_of(codec, decode, gck_device_number(kind, 0), status);
    }
    if (status == GCK_E_DRIVER && driver == 0) {
        PyErr_Format(PyExc_RuntimeError,
                     "gradckpt: codec '%s' cannot run on CUDA: there is no driver for CUDA %d or later; install one, "
                     "or pass compress=None", codec->name, runtime / 1000);
    } else if (status == GCK_E_DRIVER) {
        PyErr_Format(PyExc_RuntimeError,
                     "gradckpt: codec '%s' cannot run on CUDA: the driver supports CUDA %d.%d, gradckpt needs %d.0; "
                     "update the driver, or build gradckpt with an older toolkit",
                     codec->name, driver / 1000, driver % 1000 / 10, runtime / 1000);
    } else {
        PyErr_Format(PyExc_RuntimeError,
                     "gradckpt: codec '%s' has no CUDA kernels in this build; rebuild with nvcc and GRADCKPT_CUDA=1, "
                     "or use compress=None on CUDA", codec->name);
    }
    return -1;
}

/* Long host work runs on other threads, and Python runs meanwhile.  A launch may wait until the
 * device has room in its queue, so with a device the GIL is always released. */
static int run(gck_py *py, const gck_codec *codec, const gck_tensor *x, const gck_bytes *payloads, const gck_how *how,
               int n, int decode)
{
    int64_t here = 0;
    int device = -1;                             /* of one that lies on any */

    for (int i = 0; i < n; i++) {
        const int kind = x[i].device >= 0 ? gck_device_kind_of(x[i].device) : -1;
        if (kind >= 0 && !(py->checked & 1u << kind) && check_device(py, codec, kind, decode) < 0) {
            return -1;
        }
        device = x[i].device >= 0 ? x[i].device : device;
        here += x[i].device < 0 ? x[i].numel : 0;
    }
    const int release = device >= 0 || here >= GIL_RELEASE_NUMEL;
    gck_parallel_for *parallel = release ? gck_torch_parallel_for : NULL;
    PyThreadState *others = release ? PyEval_SaveThread() : NULL;
    const int status = decode ? gck_decode_many(codec, payloads, x, n, parallel)
                              : gck_encode_many(codec, x, payloads, how, n, parallel);
    if (release) {
        PyEval_RestoreThread(others);
    }
    return status == GCK_OK || status == GCK_E_OVERFLOW ? status == GCK_E_OVERFLOW
                                                         : raise_of(codec, decode, device, status);
}

int64_t gck_run_count(const gck_codec *codec, const gck_tensor *x)
{
    const int release = x->numel >= GIL_RELEASE_NUMEL;
    PyThreadState *others = release ? PyEval_SaveThread() : NULL;
    const int64_t values = gck_count(codec, x, release ? gck_torch_parallel_for : NULL);

    if (release) {
        PyEval_RestoreThread(others);
    }
    return values;
}

int gck_run_encode(gck_py *py, const gck_codec *codec, const gck_tensor *x, const gck_bytes *to, const gck_how *how,
                   int n)
{
    return run(py, codec, x, to, how, n, 0);
}

int gck_run_decode(gck_py *py, const gck_codec *codec, const gck_bytes *from, const gck_tensor *out, int n)
{
    return run(py, codec, out, from, NULL, n, 1);
}
