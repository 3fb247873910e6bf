/* fresh.c: new tensors through torch's C interface. */
#include "torch/fresh.h"

#include "torch/calls.h"
#include "torch/device.h"

/* Bytes: from here on the time of the call does not count, and a failure, which the C interface would print, is
 * likely.  CUDA's allocator has a pool of its own for what is smaller than a MiB. */
enum { LARGE = 1 << 18, LARGE_ON_DEVICE = 1 << 20 };

static int is_large(int64_t nbytes, int device) { return nbytes >= (device < 0 ? LARGE : LARGE_ON_DEVICE); }

static int make(const gck_py *py, int ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int device,
                gck_fresh *fresh)
{
    const int modes = py->adopt_tensor == Py_None ? 1 : gck_ask(py->dispatch_stack_len);
    const int32_t type = gck_device_type(device), index = device < 0 ? 0 : gck_device_index(device);

    if (modes != 0 || type < 0) {
        return modes < 0 ? -1 : 0;
    }
    if (gck_torch.aoti_torch_empty_strided(ndim, sizes, strides, dtype, type, index, &fresh->handle) != 0) {
        fresh->handle = NULL;
        return 0;
    }
    if (gck_torch.torch_get_mutable_data_ptr(fresh->handle, &fresh->data) != 0) {
        gck_fresh_free(fresh);
        return 0;
    }
    return 1;
}

int gck_fresh_bytes(const gck_py *py, int64_t nbytes, int device, gck_fresh *fresh)
{
    const int64_t stride = 1;

    return is_large(nbytes, device) ? 0
         : make(py, 1, &nbytes, &stride, gck_torch.aoti_torch_dtype_uint8(), device, fresh);
}

int gck_fresh_tensor(const gck_py *py, int ndim, const int64_t *sizes, const int64_t *strides, gck_dtype dtype,
                     int device, gck_fresh *fresh)
{
    int64_t plain[GCK_MAX_DIM], numel = 1, reach = 1;
    const int32_t torchs = dtype == GCK_F32  ? gck_torch.aoti_torch_dtype_float32()
                         : dtype == GCK_F16  ? gck_torch.aoti_torch_dtype_float16()
                         : dtype == GCK_BF16 ? gck_torch.aoti_torch_dtype_bfloat16()
                                             : gck_torch.aoti_torch_dtype_bool();

    for (int d = ndim - 1; d >= 0; d--) {
        plain[d] = numel;                        /* of empty tensors torch counts a size of 0 as 1 */
        numel *= sizes[d] > 0 ? sizes[d] : 1;
    }
    for (int d = 0; d < ndim && strides != NULL; d++) {
        reach += (sizes[d] - 1) * strides[d];
    }
    return is_large((strides != NULL ? reach : numel) * (int64_t)gck_itemsize(dtype), device) ? 0
         : make(py, ndim, sizes, strides != NULL ? strides : plain, torchs, device, fresh);
}

/* New reference: the tensor of a handle, which is taken over. */
static PyObject *adopt(const gck_py *py, AtenTensorHandle handle)
{
    GCK_SCOPED PyObject *capsule = PyCapsule_New(handle, NULL, NULL);
    PyObject *x = capsule != NULL ? PyObject_CallFunctionObjArgs(py->adopt_tensor, capsule, NULL) : NULL;

    if (capsule == NULL || py->adopt_copies) {
        gck_torch.aoti_torch_delete_tensor_object(handle);
    }
    return x;
}

PyObject *gck_fresh_object(const gck_py *py, gck_fresh *fresh)
{
    AtenTensorHandle handle = fresh->handle;

    *fresh = (gck_fresh){.handle = NULL};
    return adopt(py, handle);
}

/* The handles come first: adopting one runs Python, in which `fresh` may be freed. */
int gck_fresh_parts(const gck_py *py, const gck_fresh *fresh, int64_t first, int64_t second, PyObject *parts[2])
{
    const int64_t one = 1, nbytes[2] = {first, second}, offset[2] = {0, first};
    AtenTensorHandle handle[2] = {NULL, NULL};
    int status = 0;

    parts[0] = parts[1] = NULL;
    for (int i = 0; status == 0 && i < 2 && (i == 0 || second > 0); i++) {
        status = gck_torch.aoti_torch__reinterpret_tensor(fresh->handle, 1, &nbytes[i], &one, offset[i], &handle[i]);
    }
    if (status != 0) {
        PyErr_NoMemory();
    }
    for (int i = 0; i < 2; i++) {
        if (handle[i] != NULL && status == 0) {
            parts[i] = adopt(py, handle[i]);
            status = parts[i] == NULL ? -1 : 0;
        } else if (handle[i] != NULL) {
            gck_torch.aoti_torch_delete_tensor_object(handle[i]);
        }
    }
    if (status != 0) {
        Py_CLEAR(parts[0]);
    }
    return status != 0 ? -1 : 0;
}

void gck_fresh_free(gck_fresh *fresh)
{
    if (fresh->handle != NULL) {
        gck_torch.aoti_torch_delete_tensor_object(fresh->handle);
    }
    *fresh = (gck_fresh){.handle = NULL};
}
