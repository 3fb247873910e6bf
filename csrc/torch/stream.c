/* stream.c: asks torch about streams. */
#include "torch/stream.h"

#include "torch/calls.h"
#include "torch/error.h"

int gck_stream_unknown(void)
{
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "gradckpt: torch does not tell the current stream of a device; "
                                            "pass compress=None there");
    }
    return -1;
}

int gck_stream_is_captured(int device, void *stream)
{
    const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(device));
    int captured = 0;

    return device >= 0 && kind->is_captured != NULL
        && kind->is_captured(gck_device_index(device), stream, &captured) == GCK_OK && captured;
}

int gck_stream_enter(int device, void *stream, gck_stream_guard *guard)
{
    const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(device));
    const int index = gck_device_index(device);

    *guard = (gck_stream_guard){.kind = NULL, .device = device};
    if (kind->set_stream != NULL ? kind->set_stream(index, stream, &guard->before)
                                 : gck_torch.aoti_torch_create_cuda_stream_guard == NULL
                                   || gck_torch.aoti_torch_create_cuda_stream_guard(stream, index, &guard->before)) {
        return -1;
    }
    guard->kind = kind;
    return 0;
}

void gck_stream_leave(gck_stream_guard *guard)
{
    if (guard->kind == NULL) {
        return;
    }
    if (guard->kind->set_stream != NULL) {
        void *after;
        guard->kind->set_stream(gck_device_index(guard->device), guard->before, &after);
    } else {
        gck_torch.aoti_torch_delete_cuda_stream_guard(guard->before);
    }
    guard->kind = NULL;
}

static int record(const gck_py *py, PyObject *x, int device)
{
    GCK_SCOPED PyObject *stream = PyObject_CallFunction(py->accelerator_stream, "i", gck_device_index(device));
    return stream == NULL ? -1 : gck_done(PyObject_CallMethodObjArgs(x, py->names.record_stream, stream,
                                                                    NULL));
}

static int exclude(const gck_py *py, PyObject *key, int on)
{
    return gck_done(PyObject_CallFunctionObjArgs(py->set_excluded, key, on ? Py_True : Py_False, NULL));
}

int gck_stream_used(const gck_py *py, PyObject *x, int device)
{
    const int modes = gck_ask(py->dispatch_stack_len);
    int excluded, status;

    if (modes <= 0) {                            /* faster */
        return modes < 0 ? -1 : record(py, x, device);
    }
    excluded = gck_is_true(PyObject_CallFunctionObjArgs(py->is_excluded, py->key_python, NULL));
    if (excluded != 0) {                         /* modes see nothing now */
        return excluded < 0 ? -1 : record(py, x, device);
    }
    status = exclude(py, py->key_python, 1) < 0 || exclude(py, py->key_snapshot, 1) < 0 ? -1 : record(py, x, device);
    gck_error error = gck_error_take();
    exclude(py, py->key_python, 0);
    gck_error_keep(&error);
    exclude(py, py->key_snapshot, 0);
    gck_error_keep(&error);
    return gck_error_return(&error) < 0 ? -1 : status;
}
