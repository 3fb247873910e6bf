/* tensor.h: what is asked of a tensor and of torch, new tensors, and the work of the codecs on
 * them. */
#ifndef GRADCKPT_TENSOR_H
#define GRADCKPT_TENSOR_H

#include "gradckpt.h"
#include "torch/objects.h"

/* Why a tensor is not encoded.  The texts are the keys of stats()["uncompressed"]. */
#define GCK_REASONS(REASON)                                         \
    REASON(GCK_SKIP_LEAF, "leaf")                                   \
    REASON(GCK_SKIP_NO_GRAD, "does not require grad")               \
    REASON(GCK_SKIP_DTYPE, "dtype the codec does not take")         \
    REASON(GCK_SKIP_FLOAT64, "float64, which no codec takes")       \
    REASON(GCK_SKIP_OVERFLOW, "values the codec cannot hold")       \
    REASON(GCK_SKIP_FLAG, "no flag left to report overflow")        \
    REASON(GCK_SKIP_DENSE, "too few zeros for the codec")           \
    REASON(GCK_SKIP_PLACE, "not offloaded")                         \
    REASON(GCK_SKIP_SMALL, "smaller than min_numel")                \
    REASON(GCK_SKIP_EXACT, "backward needs it exactly")             \
    REASON(GCK_SKIP_ATTRIBUTE, "attribute that cannot be copied")   \
    REASON(GCK_SKIP_UNKNOWN, "not known which operator saves it")   \
    REASON(GCK_SKIP_REGION, "inside a region, which runs again")    \
    REASON(GCK_SKIP_SUBCLASS, "tensor subclass")                    \
    REASON(GCK_SKIP_LAYOUT, "not a plain strided tensor with data") \
    REASON(GCK_SKIP_DEVICE, "device without kernels")               \
    REASON(GCK_SKIP_DUAL, "carries a forward-mode tangent")         \
    REASON(GCK_SKIP_TRACING, "tracing, fake or functional mode active")
typedef enum {
    GCK_COMPRESS,
#define REASON(name, text) name,
    GCK_REASONS(REASON)
#undef REASON
    GCK_NREASONS
} gck_skip_reason;

extern const char *const gck_reason_text[GCK_NREASONS];

/* Tensor, Parameter or a subclass: 1; 0; or -1 with an exception. */
int gck_is_tensor(const gck_py *py, PyObject *x);

/* 1 for a Tensor or Parameter itself, of which C reads everything without Python; 0 for a subclass. */
static inline int gck_is_plain_tensor(const gck_py *py, PyObject *x)
{
    return (PyObject *)Py_TYPE(x) == py->Tensor || (PyObject *)Py_TYPE(x) == py->Parameter;
}

/* 1 when a mode is active under which a tensor's memory is not its values; 0; -1. */
int gck_tracing_modes(const gck_py *py);

/* The same, or a transform of torch.func. */
int gck_tracing(const gck_py *py);

/* The number of dispatch modes, or -1.  The mode of a simulated step stands for the kernels and is
 * not counted. */
int gck_modes_that_watch(const gck_py *py);

/* 1 inside a torch.func transform; 0; -1. */
int gck_functorch_active(const gck_py *py);

/* torch's objects for them: borrowed and valid for ever; new reference. */
PyObject *gck_dtype_object(const gck_py *py, gck_dtype dtype);
PyObject *gck_device_object(const gck_py *py, int device);

/* New reference: n integers as a tuple. */
PyObject *gck_sizes(int n, const int64_t *values);

/* New reference: uint8[nbytes], from torch's allocator. */
PyObject *gck_bytes_empty(const gck_py *py, int64_t nbytes, int device);

/* New reference: empty tensor; strides NULL means contiguous. */
PyObject *gck_empty(const gck_py *py, int ndim, const int64_t *sizes, const int64_t *strides, gck_dtype dtype,
                    int device);

/* Encode or decode n tensors, whose owners the caller holds.  The GIL is released for device work
 * and for long host work.  0, or -1 with an exception that names the codec; encode: 1 when the
 * codec overflows. */
int gck_run_encode(gck_py *py, const gck_codec *codec, const gck_tensor *x, const gck_bytes *to, const gck_how *how,
                   int n);
int gck_run_decode(gck_py *py, const gck_codec *codec, const gck_bytes *from, const gck_tensor *out, int n);

/* How many values of x, in host memory, its payload will hold: gck_count(), with the GIL released as above. */
int64_t gck_run_count(const gck_codec *codec, const gck_tensor *x);

/* Make `pack` (taken over; NULL: making it raised) and `unpack`, bound to `self`, the saved-tensor hooks of this
 * thread.  0 or -1. */
int gck_hooks_push(const gck_py *py, PyObject *pack, PyMethodDef *unpack, PyObject *self);
/* Take the innermost hooks off, also with an exception pending, which survives. */
void gck_hooks_pop(const gck_py *py);

#endif
