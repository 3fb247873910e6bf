/* ops.c: the codecs as dispatcher operators, so that the profiler, FakeTensor and
 * torch.compile see them.  The engine itself calls the codecs directly.
 *
 *     gradckpt::encode(Tensor x, str codec) -> Tensor
 *     gradckpt::decode(Tensor payload, str codec, SymInt[] size, ScalarType dtype) -> Tensor
 *     gradckpt::encode_many(Tensor[] xs, str codec) -> Tensor[]
 *     gradckpt::decode_many(Tensor[] payloads, str codec, Tensor(a!)[] out) -> ()
 *
 * A boxed kernel owns every argument on its stack and must release each.  It fails by
 * aoti_torch_check, a C++ exception that unwinds through here (-fexceptions): nothing may
 * be held by then. */
#include "ops.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../gradckpt.h"
#include "abi.h"

/* Packing of arguments as torch 2.11 defines it; later versions keep it for us. */
static const uint64_t build_version = UINT64_C(0x020B000000000000);

typedef struct {
    AtenTensorHandle tensor;
    gck_tensor       view;
    int32_t          device_type, device_index, dtype;
} operand;

static const gck_codec *take_codec(StableIValue value, char *error, size_t size)
{
    StringHandle handle = (StringHandle)(uintptr_t)value;
    const char *name = "";
    const gck_codec *codec = NULL;

    if (gck_torch.torch_string_c_str(handle, &name) == 0) {
        codec = gck_codec_find(name);
    }
    if (codec == NULL) {
        snprintf(error, size, "gradckpt: unknown codec '%s'", name);
    }
    gck_torch.torch_delete_string(handle);
    return codec;
}

static int dtype_of(int32_t shim, gck_dtype *dtype)
{
    if (shim == gck_torch.aoti_torch_dtype_float32()) {
        *dtype = GCK_F32;
    } else if (shim == gck_torch.aoti_torch_dtype_float16()) {
        *dtype = GCK_F16;
    } else if (shim == gck_torch.aoti_torch_dtype_bfloat16()) {
        *dtype = GCK_BF16;
    } else if (shim == gck_torch.aoti_torch_dtype_bool()) {
        *dtype = GCK_BOOL;
    } else {
        return -1;
    }
    return 0;
}

/* Shape, device and stream of o->tensor; not its dtype or data.  0 or -1. */
static int describe(operand *o)
{
    int64_t ndim, *sizes, *strides;

    if (gck_torch.aoti_torch_get_dim(o->tensor, &ndim) || gck_torch.aoti_torch_get_sizes(o->tensor, &sizes)
        || gck_torch.aoti_torch_get_strides(o->tensor, &strides)
        || gck_torch.aoti_torch_get_numel(o->tensor, &o->view.numel)
        || gck_torch.aoti_torch_get_dtype(o->tensor, &o->dtype)
        || gck_torch.aoti_torch_get_device_type(o->tensor, &o->device_type)
        || gck_torch.aoti_torch_get_device_index(o->tensor, &o->device_index)) {
        return -1;
    }
    o->view.ndim = (int)ndim;
    o->view.sizes = sizes;
    o->view.strides = strides;
    if (gck_is_contiguous(o->view.ndim, sizes, strides)) {
        o->view.strides = NULL;
    }
    o->view.stream = NULL;
    o->view.device = -1;
    if (o->device_type == gck_torch.aoti_torch_device_type_cuda()) {
        o->view.device = o->device_index;
        return gck_torch.aoti_torch_get_current_cuda_stream == NULL ? -1
             : gck_torch.aoti_torch_get_current_cuda_stream(o->device_index, &o->view.stream);
    }
    return 0;
}

/* Words for a status that is not good. */
static void say(const gck_codec *codec, int status, char *error, size_t size)
{
    if (status != GCK_OK) {
        snprintf(error, size, "gradckpt: codec '%s': %s (status %d)", codec->name, gck_status_text(status), status);
    }
}

static void release(AtenTensorHandle *tensor)
{
    if (*tensor != NULL) {
        gck_torch.aoti_torch_delete_tensor_object(*tensor);
        *tensor = NULL;
    }
}

/* Raises the error, or, where there should be a result and neither is there, a general one: torch did not answer. */
static void fail_if(char *error, size_t size, bool no_result)
{
    if (error[0] == '\0' && no_result) {
        snprintf(error, size, "gradckpt: torch does not tell this tensor's shape, device or stream; use a CPU or CUDA "
                              "build of torch");
    }
    if (error[0] != '\0') {
        gck_torch.aoti_torch_check(false, "gradckpt", __FILE__, __LINE__, error);
    }
}

/* Room for the payload of x->tensor, whose view is then complete.  NULL: error says why. */
static AtenTensorHandle empty_payload(const gck_codec *codec, operand *x, void **payload, char *error, size_t size)
{
    AtenTensorHandle out = NULL;
    const void *data;
    const int64_t one = 1;

    if (describe(x) != 0 || dtype_of(x->dtype, &x->view.dtype) != 0) {
        snprintf(error, size, "gradckpt: encode takes float32, float16, bfloat16 and bool tensors on CPU and CUDA");
        return NULL;
    }
    if (!(codec->dtypes & GCK_BIT(x->view.dtype))) {
        snprintf(error, size, "gradckpt: codec '%s': %s", codec->name, gck_status_text(GCK_E_DTYPE));
        return NULL;
    }
    const int64_t nbytes = gck_nbytes(codec, x->view.numel, x->view.dtype);
    if (gck_torch.torch_get_const_data_ptr(x->tensor, &data)
        || gck_torch.aoti_torch_empty_strided(1, &nbytes, &one, gck_torch.aoti_torch_dtype_uint8(), x->device_type,
                                              x->device_index, &out)
        || gck_torch.torch_get_mutable_data_ptr(out, payload)) {
        snprintf(error, size, "gradckpt: could not allocate %lld bytes for a payload", (long long)nbytes);
        release(&out);
    } else {
        x->view.data = (void *)data;
    }
    return out;
}

static AtenTensorHandle encode(const gck_codec *codec, operand *x, char *error, size_t size)
{
    void *payload;
    AtenTensorHandle out = empty_payload(codec, x, &payload, error, size);

    if (out != NULL) {
        say(codec, gck_encode(codec, &x->view, payload, NULL, gck_torch_parallel_for), error, size);
        if (error[0] != '\0') {
            release(&out);
        }
    }
    return out;
}

static void encode_boxed(StableIValue *stack, uint64_t nargs, uint64_t nreturns)
{
    char error[256] = "";
    operand x = {.tensor = (AtenTensorHandle)(uintptr_t)stack[0]};
    const gck_codec *codec = take_codec(stack[1], error, sizeof error);
    AtenTensorHandle out = codec != NULL ? encode(codec, &x, error, sizeof error) : NULL;

    (void)nargs;
    (void)nreturns;
    gck_torch.aoti_torch_delete_tensor_object(x.tensor);
    fail_if(error, sizeof error, out == NULL);
    stack[0] = (StableIValue)(uintptr_t)out;
}

/* Sizes out of the list, which is released; their number, or -1. */
static int take_sizes(StableIValue value, int64_t sizes[GCK_MAX_DIM])
{
    StableListHandle list = (StableListHandle)(uintptr_t)value;
    size_t n = 0;
    int result = -1;

    if (gck_torch.torch_list_size(list, &n) == 0 && n <= GCK_MAX_DIM) {
        result = (int)n;
        for (size_t i = 0; i < n; i++) {
            StableIValue item;
            if (gck_torch.torch_list_get_item(list, i, &item) != 0) {
                result = -1;
                break;
            }
            sizes[i] = (int64_t)item;
        }
    }
    gck_torch.torch_delete_list(list);
    return result;
}

static void contiguous_strides(int ndim, const int64_t *sizes, int64_t *strides)
{
    int64_t step = 1;

    for (int d = ndim - 1; d >= 0; d--) {
        strides[d] = step;
        step *= sizes[d] > 0 ? sizes[d] : 1;
    }
}

/* Are these the bytes of out, whose dtype is known to be taken?  0 with *bytes, or -1 and error says why. */
static int match_payload(const gck_codec *codec, operand *payload, const operand *out, const void **bytes, char *error,
                         size_t size)
{
    if (describe(payload) != 0 || payload->dtype != gck_torch.aoti_torch_dtype_uint8() || payload->view.strides
        || gck_torch.torch_get_const_data_ptr(payload->tensor, bytes)) {
        snprintf(error, size, "gradckpt: decode takes a contiguous uint8 payload");
        return -1;
    }
    if (payload->view.numel > 0 && (uintptr_t)*bytes % GCK_PAYLOAD_ALIGNMENT != 0) {
        snprintf(error, size, "gradckpt: decode takes a payload at a multiple of %d bytes; pass payload.clone()",
                 GCK_PAYLOAD_ALIGNMENT);
        return -1;
    }
    if (payload->view.device != out->view.device) {
        snprintf(error, size, "gradckpt: decode takes a payload on the device of the tensor it is decoded into");
        return -1;
    }
    const int64_t nbytes = gck_nbytes(codec, out->view.numel, out->view.dtype);
    if (nbytes != payload->view.numel) {
        snprintf(error, size, "gradckpt: a payload of codec '%s' for this size and dtype has %lld bytes, not %lld",
                 codec->name, (long long)nbytes, (long long)payload->view.numel);
        return -1;
    }
    return 0;
}

/* The dtype of what is decoded.  0, or -1 and error says why. */
static int accept_dtype(const gck_codec *codec, int32_t dtype, operand *out, char *error, size_t size)
{
    if (dtype_of(dtype, &out->view.dtype) != 0) {
        snprintf(error, size, "gradckpt: decode gives float32, float16, bfloat16 or bool tensors of at most 64 dimensions");
        return -1;
    }
    if (!(codec->dtypes & GCK_BIT(out->view.dtype))) {
        snprintf(error, size, "gradckpt: codec '%s': %s", codec->name, gck_status_text(GCK_E_DTYPE));
        return -1;
    }
    return 0;
}

static AtenTensorHandle decode(const gck_codec *codec, operand *payload, int ndim, const int64_t *sizes, int32_t dtype,
                               char *error, size_t size)
{
    int64_t strides[GCK_MAX_DIM];
    operand out = {.tensor = NULL};
    const void *bytes;

    if (ndim < 0) {
        snprintf(error, size, "gradckpt: decode gives tensors of at most 64 dimensions");
        return NULL;
    }
    if (describe(payload) != 0 || accept_dtype(codec, dtype, &out, error, size) < 0) {
        return NULL;
    }
    contiguous_strides(ndim, sizes, strides);
    if (gck_torch.aoti_torch_empty_strided(ndim, sizes, strides, dtype, payload->device_type, payload->device_index,
                                           &out.tensor)
        || describe(&out) != 0 || gck_torch.torch_get_mutable_data_ptr(out.tensor, &out.view.data)) {
        snprintf(error, size, "gradckpt: could not allocate the decoded tensor");
    } else if (match_payload(codec, payload, &out, &bytes, error, size) == 0) {
        say(codec, gck_decode(codec, bytes, &out.view, gck_torch_parallel_for), error, size);
    }
    if (error[0] != '\0') {
        release(&out.tensor);
    }
    return out.tensor;
}

static void decode_boxed(StableIValue *stack, uint64_t nargs, uint64_t nreturns)
{
    char error[256] = "";
    int64_t sizes[GCK_MAX_DIM];
    operand payload = {.tensor = (AtenTensorHandle)(uintptr_t)stack[0]};
    const gck_codec *codec = take_codec(stack[1], error, sizeof error);
    const int ndim = take_sizes(stack[2], sizes);
    const int32_t dtype = (int32_t)stack[3];
    AtenTensorHandle out = codec != NULL ? decode(codec, &payload, ndim, sizes, dtype, error, sizeof error) : NULL;

    (void)nargs;
    (void)nreturns;
    gck_torch.aoti_torch_delete_tensor_object(payload.tensor);
    fail_if(error, sizeof error, out == NULL);
    stack[0] = (StableIValue)(uintptr_t)out;
}

/* ---- several tensors ---- */

/* What one call works at; arrays of n. */
typedef struct {
    size_t            n;
    operand          *x;                         /* tensors, owned                              */
    gck_tensor       *views;
    void            **payloads;                  /* borrowed from `bytes`                       */
    AtenTensorHandle *bytes;                     /* payload tensors, owned                      */
} batch;

/* Takes the list's items, which are owned, and releases the list.  0 or -1. */
static int take_tensors(StableIValue value, size_t *n, AtenTensorHandle **tensors)
{
    StableListHandle list = (StableListHandle)(uintptr_t)value;
    StableIValue item;
    int status = gck_torch.torch_list_size(list, n) == 0 ? 0 : -1;

    *n = status == 0 ? *n : 0;
    *tensors = calloc(*n + 1, sizeof **tensors);
    for (size_t i = 0; i < *n; i++) {
        if (gck_torch.torch_list_get_item(list, i, &item) != 0) {
            status = -1;
        } else if (*tensors == NULL) {
            status = -1;
            gck_torch.aoti_torch_delete_tensor_object((AtenTensorHandle)(uintptr_t)item);
        } else {
            (*tensors)[i] = (AtenTensorHandle)(uintptr_t)item;
        }
    }
    gck_torch.torch_delete_list(list);
    return status;
}

static int batch_begin(batch *b, StableIValue list, char *error, size_t size)
{
    AtenTensorHandle *tensors;
    const int taken = take_tensors(list, &b->n, &tensors);

    b->x = calloc(b->n + 1, sizeof *b->x);
    b->views = calloc(b->n + 1, sizeof *b->views);
    b->payloads = calloc(b->n + 1, sizeof *b->payloads);
    for (size_t i = 0; tensors != NULL && i < b->n; i++) {
        if (b->x != NULL) {
            b->x[i].tensor = tensors[i];
        } else {
            release(&tensors[i]);
        }
    }
    free(tensors);
    if (taken < 0 || b->x == NULL || b->views == NULL || b->payloads == NULL) {
        snprintf(error, size, "gradckpt: could not read the list of tensors");
        return -1;
    }
    return 0;
}

static void batch_end(batch *b, size_t nbytes)
{
    for (size_t i = 0; b->x != NULL && i < b->n; i++) {
        release(&b->x[i].tensor);
    }
    for (size_t i = 0; b->bytes != NULL && i < nbytes; i++) {
        release(&b->bytes[i]);
    }
    free(b->x);
    free(b->views);
    free((void *)b->payloads);
    free(b->bytes);
}

/* Payloads of all of b->x into b->bytes.  Returns the list, or NULL and error says why. */
static StableListHandle encode_many(const gck_codec *codec, batch *b, char *error, size_t size)
{
    StableListHandle list = NULL;

    b->bytes = calloc(b->n + 1, sizeof *b->bytes);
    for (size_t i = 0; b->bytes != NULL && error[0] == '\0' && i < b->n; i++) {
        b->bytes[i] = empty_payload(codec, &b->x[i], &b->payloads[i], error, size);
        b->views[i] = b->x[i].view;
    }
    if (error[0] == '\0' && (b->bytes == NULL || gck_torch.torch_new_list_reserve_size(b->n, &list) != 0)) {
        snprintf(error, size, "gradckpt: out of memory");
    }
    if (error[0] != '\0') {
        return NULL;
    }
    say(codec, gck_encode_many(codec, b->views, b->payloads, NULL, (int)b->n, gck_torch_parallel_for), error, size);
    for (size_t i = 0; error[0] == '\0' && i < b->n; i++) {
        if (gck_torch.torch_list_push_back(list, (StableIValue)(uintptr_t)b->bytes[i]) != 0) {
            snprintf(error, size, "gradckpt: out of memory");
        }
    }
    if (error[0] != '\0') {
        gck_torch.torch_delete_list(list);         /* not its items: those are ours still */
        return NULL;
    }
    return list;
}

static void encode_many_boxed(StableIValue *stack, uint64_t nargs, uint64_t nreturns)
{
    char error[256] = "";
    batch b = {0};
    const int begun = batch_begin(&b, stack[0], error, sizeof error);
    const gck_codec *codec = take_codec(stack[1], error, sizeof error);
    StableListHandle list = begun == 0 && codec != NULL ? encode_many(codec, &b, error, sizeof error) : NULL;

    (void)nargs;
    (void)nreturns;
    batch_end(&b, list != NULL ? 0 : b.n);         /* the list owns them now */
    fail_if(error, sizeof error, list == NULL);
    stack[0] = (StableIValue)(uintptr_t)list;
}

/* b->bytes into b->x. */
static void decode_many(const gck_codec *codec, batch *b, char *error, size_t size)
{
    for (size_t i = 0; i < b->n; i++) {
        operand *out = &b->x[i], payload = {.tensor = b->bytes[i]};
        if (describe(out) != 0 || accept_dtype(codec, out->dtype, out, error, size) < 0
            || match_payload(codec, &payload, out, (const void **)&b->payloads[i], error, size) < 0
            || gck_torch.torch_get_mutable_data_ptr(out->tensor, &out->view.data)) {
            if (error[0] == '\0') {
                snprintf(error, size, "gradckpt: decode_many cannot write into this tensor");
            }
            return;
        }
        b->views[i] = out->view;
    }
    say(codec, gck_decode_many(codec, (const void *const *)b->payloads, b->views, (int)b->n, gck_torch_parallel_for),
        error, size);
}

static void decode_many_boxed(StableIValue *stack, uint64_t nargs, uint64_t nreturns)
{
    char error[256] = "";
    size_t nbytes;
    batch b = {0};
    const int taken = take_tensors(stack[0], &nbytes, &b.bytes);
    const gck_codec *codec = take_codec(stack[1], error, sizeof error);
    const int begun = batch_begin(&b, stack[2], error, sizeof error);

    (void)nargs;
    (void)nreturns;
    if (taken < 0 || (begun == 0 && codec != NULL && nbytes != b.n)) {
        snprintf(error, sizeof error, "gradckpt: decode_many takes as many payloads (%zu) as tensors to write (%zu)",
                 nbytes, b.n);
    } else if (begun == 0 && codec != NULL) {
        decode_many(codec, &b, error, sizeof error);
    }
    batch_end(&b, nbytes);
    fail_if(error, sizeof error, false);
}

static int implement(const char *key)
{
    TorchLibraryHandle lib;                      /* kept for ever: deleting it would unregister */

    return gck_torch.aoti_torch_library_init_impl("gradckpt", key, __FILE__, __LINE__, &lib)
        || gck_torch.torch_library_impl(lib, "encode", encode_boxed, build_version)
        || gck_torch.torch_library_impl(lib, "decode", decode_boxed, build_version)
        || gck_torch.torch_library_impl(lib, "encode_many", encode_many_boxed, build_version)
        || gck_torch.torch_library_impl(lib, "decode_many", decode_many_boxed, build_version);
}

const char *gck_ops_register(void)
{
    static atomic_flag registered = ATOMIC_FLAG_INIT;   /* per process, like the dispatcher */
    TorchLibraryHandle lib;

    if (atomic_flag_test_and_set(&registered)) {
        return NULL;
    }
    if (gck_torch.aoti_torch_library_init_fragment("gradckpt", __FILE__, __LINE__, &lib)
        || gck_torch.aoti_torch_library_def(lib, "encode(Tensor x, str codec) -> Tensor")
        || gck_torch.aoti_torch_library_def(lib, "decode(Tensor payload, str codec, SymInt[] size, ScalarType dtype)"
                                                 " -> Tensor")
        || gck_torch.aoti_torch_library_def(lib, "encode_many(Tensor[] xs, str codec) -> Tensor[]")
        || gck_torch.aoti_torch_library_def(lib, "decode_many(Tensor[] payloads, str codec, Tensor(a!)[] out) -> ()")) {
        return "defining torch.ops.gradckpt";
    }
    return implement("CPU") || implement("CUDA") ? "registering the kernels of torch.ops.gradckpt" : NULL;
}
