/* ops.c: the codecs as dispatcher operators, so that the profiler, FakeTensor and torch.compile see
 * them.  The engine itself calls the codecs directly.
 *
 *     gradckpt::encode(Tensor x, str codec) -> Tensor
 *     gradckpt::decode(Tensor payload, str codec, SymInt[] size, ScalarType dtype) -> Tensor
 *     gradckpt::encode_many(Tensor[] xs, str codec) -> Tensor[]
 *     gradckpt::decode_many(Tensor[] payloads, str codec, Tensor(a!)[] out) -> ()
 *
 * A boxed kernel owns every argument on its stack and must release each.  It fails by
 * aoti_torch_check, a C++ exception that unwinds through here (-fexceptions, as no other file), so
 * nothing may be held by then. */
#include "torch/ops.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradckpt.h"
#include "torch/abi.h"
#include "torch/device.h"

/* The argument layout of torch 2.11; later versions keep it for us. */
static const uint64_t build_version = UINT64_C(0x020B000000000000);

typedef struct {
    AtenTensorHandle tensor;                     /* owned; NULL: none                           */
    gck_tensor       view;
    int32_t          device_type, device_index, dtype;
} operand;

/* One call of an operator. */
typedef struct {
    const gck_codec *codec;
    size_t           n;                          /* length of each array                        */
    operand         *values;                     /* encoded, or decoded into; NULL: no memory   */
    operand         *bytes;                      /* their payloads                              */
    gck_tensor      *views;                      /* the codec's operands: of the values,        */
    gck_bytes        *payloads;                  /* of the bytes                                */
    char             error[256];                 /* "": no error                                */
} job;

/* Record an error.  Always -1.  The first error is raised. */
static int refuse(job *w, const char *format, ...)
{
    va_list arguments;

    if (w->error[0] == '\0') {
        va_start(arguments, format);
        vsnprintf(w->error, sizeof w->error, format, arguments);
        va_end(arguments);
    }
    return -1;
}

/* ---- what an operator is given ---- */

static void take_codec(job *w, StableIValue value)
{
    StringHandle handle = (StringHandle)(uintptr_t)value;
    const char *name = "";

    if (gck_torch.torch_string_c_str(handle, &name) == 0) {
        w->codec = gck_codec_find(name);
    }
    if (w->codec == NULL) {
        refuse(w, "gradckpt: unknown codec '%s'", name);
    }
    gck_torch.torch_delete_string(handle);
}

/* Allocate the arrays, as one block that `values` begins. */
static void begin(job *w, size_t n)
{
    const size_t room = n + 1;

    w->n = n;
    w->values = calloc(room, 2 * sizeof *w->values + sizeof *w->views + sizeof *w->payloads);
    if (w->values == NULL) {
        refuse(w, "gradckpt: out of memory");
        return;
    }
    w->bytes = w->values + room;
    w->views = (gck_tensor *)(w->bytes + room);
    w->payloads = (gck_bytes *)(w->views + room);
}

static void take(operand *array, size_t i, StableIValue value)
{
    AtenTensorHandle tensor = (AtenTensorHandle)(uintptr_t)value;

    if (array != NULL) {
        array[i].tensor = tensor;
    } else {
        gck_torch.aoti_torch_delete_tensor_object(tensor);
    }
}

static size_t length(job *w, StableIValue list)
{
    size_t n = 0;

    if (gck_torch.torch_list_size((StableListHandle)(uintptr_t)list, &n) != 0) {
        refuse(w, "gradckpt: could not read the list of tensors");
    }
    return n;
}

/* Take the list's items, which are owned. */
static void take_list(job *w, operand *array, size_t n, StableIValue value)
{
    StableListHandle list = (StableListHandle)(uintptr_t)value;
    StableIValue item;

    for (size_t i = 0; i < n; i++) {
        if (gck_torch.torch_list_get_item(list, i, &item) == 0) {
            take(array, i, item);
        } else {
            refuse(w, "gradckpt: could not read the list of tensors");
        }
    }
    gck_torch.torch_delete_list(list);
}

/* Read sizes from the list and release it; their number, or -1. */
static int take_sizes(job *w, StableIValue value, int64_t sizes[GCK_MAX_DIM])
{
    StableListHandle list = (StableListHandle)(uintptr_t)value;
    StableIValue item;
    size_t n = 0;
    int good = gck_torch.torch_list_size(list, &n) == 0 && n <= GCK_MAX_DIM;

    for (size_t i = 0; good && i < n; i++) {
        good = gck_torch.torch_list_get_item(list, i, &item) == 0;
        sizes[i] = good ? (int64_t)item : 0;
    }
    gck_torch.torch_delete_list(list);
    return good ? (int)n : refuse(w, "gradckpt: decode gives tensors of at most 64 dimensions");
}

/* ---- facts of a tensor: 0, or -1 and the error says why ---- */

/* Read shape, dtype, device and stream, but not the data. */
static int describe(job *w, operand *x)
{
    int64_t ndim, *sizes, *strides;
    int missing = gck_torch.aoti_torch_get_dim(x->tensor, &ndim) || gck_torch.aoti_torch_get_sizes(x->tensor, &sizes)
        || gck_torch.aoti_torch_get_strides(x->tensor, &strides)
        || gck_torch.aoti_torch_get_numel(x->tensor, &x->view.numel)
        || gck_torch.aoti_torch_get_dtype(x->tensor, &x->dtype)
        || gck_torch.aoti_torch_get_device_type(x->tensor, &x->device_type)
        || gck_torch.aoti_torch_get_device_index(x->tensor, &x->device_index);

    if (!missing) {
        x->view.ndim = (int)ndim;
        x->view.sizes = sizes;
        x->view.strides = gck_is_contiguous(x->view.ndim, sizes, strides) ? NULL : strides;
        x->view.device = gck_device_of_torch(x->device_type, x->device_index);
        missing = x->view.device == GCK_NO_DEVICE
            || (x->view.device >= 0 && gck_stream_of(NULL, x->view.device, &x->view.stream));
    }
    return missing ? refuse(w, "gradckpt: torch does not tell this tensor's shape, device or stream; use a CPU or CUDA "
                               "build of torch")
         : ndim > GCK_MAX_DIM ? refuse(w, "gradckpt: codecs take tensors of at most 64 dimensions") : 0;
}

/* Store x->dtype in the codecs' numbering.  others: the message for a dtype that no codec takes. */
static int accept_dtype(job *w, operand *x, const char *others)
{
    int32_t (*const known[GCK_NDTYPES])(void) = {gck_torch.aoti_torch_dtype_float32, gck_torch.aoti_torch_dtype_float16,
                                                 gck_torch.aoti_torch_dtype_bfloat16, gck_torch.aoti_torch_dtype_bool};

    for (int d = 0; d < GCK_NDTYPES; d++) {
        if (x->dtype == known[d]()) {
            x->view.dtype = (gck_dtype)d;
            return w->codec->dtypes & GCK_BIT(d) ? 0
                 : refuse(w, "gradckpt: codec '%s': %s", w->codec->name, gck_status_text(GCK_E_DTYPE));
        }
    }
    return refuse(w, "%s", others);
}

/* ---- what it does ---- */

/* Allocate the payload of value i. */
static int prepare_encode(job *w, size_t i)
{
    operand *x = &w->values[i];
    const void *data;
    const int64_t one = 1;

    if (describe(w, x) < 0 || accept_dtype(w, x, "gradckpt: encode takes float32, float16, bfloat16 and bool "
                                                 "tensors on CPU and CUDA") < 0) {
        return -1;
    }
    const gck_lengths lengths = gck_lengths_of(w->codec, &x->view);
    const int64_t nbytes = lengths.codes + lengths.scales;
    void *buffer;
    if (gck_torch.torch_get_const_data_ptr(x->tensor, &data)
        || gck_torch.aoti_torch_empty_strided(1, &nbytes, &one, gck_torch.aoti_torch_dtype_uint8(), x->device_type,
                                              x->device_index, &w->bytes[i].tensor)
        || gck_torch.torch_get_mutable_data_ptr(w->bytes[i].tensor, &buffer)) {
        return refuse(w, "gradckpt: could not allocate %lld bytes for a payload", (long long)nbytes);
    }
    w->payloads[i] = gck_in_one(buffer, lengths);
    x->view.data = (void *)data;
    w->views[i] = x->view;
    return 0;
}

static const char decodes[] =
    "gradckpt: decode gives float32, float16, bfloat16 or bool tensors of at most 64 dimensions";

/* Check that bytes i are the payload of value i, which exists. */
static int prepare_decode(job *w, size_t i)
{
    operand *out = &w->values[i], *payload = &w->bytes[i];
    const void *data;

    if (describe(w, out) < 0 || accept_dtype(w, out, decodes) < 0 || describe(w, payload) < 0) {
        return -1;
    }
    if (gck_torch.torch_get_mutable_data_ptr(out->tensor, &out->view.data)) {
        return refuse(w, "gradckpt: decode_many cannot write into this tensor");
    }
    if (payload->dtype != gck_torch.aoti_torch_dtype_uint8() || payload->view.strides
        || gck_torch.torch_get_const_data_ptr(payload->tensor, &data)) {
        return refuse(w, "gradckpt: decode takes a contiguous uint8 payload");
    }
    if (payload->view.numel > 0 && (uintptr_t)data % GCK_PAYLOAD_ALIGNMENT != 0) {
        return refuse(w, "gradckpt: decode takes a payload at a multiple of %d bytes; pass payload.clone()",
                      GCK_PAYLOAD_ALIGNMENT);
    }
    if (payload->view.device != out->view.device) {
        return refuse(w, "gradckpt: decode takes a payload on the device of the tensor it is decoded into");
    }
    const gck_lengths lengths = gck_lengths_of(w->codec, &out->view);
    const int64_t nbytes = lengths.codes + lengths.scales;
    if (nbytes != payload->view.numel) {
        return refuse(w, "gradckpt: a payload of codec '%s' for this size and dtype has %lld bytes, not %lld",
                      w->codec->name, (long long)nbytes, (long long)payload->view.numel);
    }
    w->payloads[i] = gck_in_one((void *)data, lengths);
    w->views[i] = out->view;
    return 0;
}

/* Make a new tensor to decode bytes 0 into. */
static int make_value(job *w, int ndim, const int64_t *sizes, int32_t dtype)
{
    operand *out = w->values, *payload = w->bytes;
    int64_t strides[GCK_MAX_DIM], step = 1;

    out->dtype = dtype;
    if (describe(w, payload) < 0 || accept_dtype(w, out, decodes) < 0) {
        return -1;
    }
    for (int d = ndim - 1; d >= 0; d--) {
        strides[d] = step;
        step *= sizes[d] > 0 ? sizes[d] : 1;
    }
    return gck_torch.aoti_torch_empty_strided(ndim, sizes, strides, dtype, payload->device_type, payload->device_index,
                                              &out->tensor)
        ? refuse(w, "gradckpt: could not allocate the decoded tensor") : 0;
}

static void run(job *w, int (*prepare)(job *, size_t))
{
    int status = GCK_OK;

    for (size_t i = 0; w->error[0] == '\0' && i < w->n; i++) {
        prepare(w, i);
    }
    if (w->error[0] == '\0') {
        status = prepare == prepare_encode
            ? gck_encode_many(w->codec, w->views, w->payloads, NULL, (int)w->n, gck_torch_parallel_for)
            : gck_decode_many(w->codec, w->payloads, w->views, (int)w->n, gck_torch_parallel_for);
    }
    if (status != GCK_OK) {
        refuse(w, "gradckpt: codec '%s': %s", w->codec->name, gck_device_error(w->views[0].device, status));
    }
}

/* ---- what it gives ---- */

/* Give the tensor to the caller, who then owns it; nothing after an error. */
static StableIValue give(const job *w, operand *array, size_t i)
{
    AtenTensorHandle tensor = w->error[0] == '\0' ? array[i].tensor : NULL;

    if (tensor != NULL) {
        array[i].tensor = NULL;
    }
    return (StableIValue)(uintptr_t)tensor;
}

/* Give the payloads as a list. */
static StableIValue give_list(job *w)
{
    StableListHandle list = NULL;

    if (w->error[0] == '\0' && gck_torch.torch_new_list_reserve_size(w->n, &list) != 0) {
        refuse(w, "gradckpt: out of memory");
    }
    for (size_t i = 0; w->error[0] == '\0' && i < w->n; i++) {
        if (gck_torch.torch_list_push_back(list, (StableIValue)(uintptr_t)w->bytes[i].tensor) != 0) {
            refuse(w, "gradckpt: out of memory");
        }
    }
    if (w->error[0] != '\0' && list != NULL) {
        gck_torch.torch_delete_list(list);       /* not its items, which are still ours */
    }
    for (size_t i = 0; w->error[0] == '\0' && i < w->n; i++) {
        give(w, w->bytes, i);
    }
    return (StableIValue)(uintptr_t)list;
}

/* Release everything, then raise the error. */
static void end(job *w)
{
    for (size_t i = 0; w->values != NULL && i < 2 * (w->n + 1); i++) {
        if (w->values[i].tensor != NULL) {       /* `bytes` come next */
            gck_torch.aoti_torch_delete_tensor_object(w->values[i].tensor);
        }
    }
    free(w->values);
    if (w->error[0] != '\0') {
        gck_torch.aoti_torch_check(false, "gradckpt", __FILE__, __LINE__, w->error);
    }
}

/* ---- the operators ---- */

#define UNUSED __attribute__((unused))

static void encode(StableIValue *stack, int many)
{
    job w = {.error = ""};

    begin(&w, many ? length(&w, stack[0]) : 1);
    take_codec(&w, stack[1]);
    if (many) {
        take_list(&w, w.values, w.n, stack[0]);
    } else {
        take(w.values, 0, stack[0]);
    }
    run(&w, prepare_encode);
    const StableIValue result = many ? give_list(&w) : give(&w, w.bytes, 0);
    end(&w);
    stack[0] = result;
}

static void encode_boxed(StableIValue *stack, UNUSED uint64_t nargs, UNUSED uint64_t nreturns)
{
    encode(stack, 0);
}

static void encode_many_boxed(StableIValue *stack, UNUSED uint64_t nargs, UNUSED uint64_t nreturns)
{
    encode(stack, 1);
}

static void decode_boxed(StableIValue *stack, UNUSED uint64_t nargs, UNUSED uint64_t nreturns)
{
    job w = {.error = ""};
    int64_t sizes[GCK_MAX_DIM];

    begin(&w, 1);
    take_codec(&w, stack[1]);
    take(w.bytes, 0, stack[0]);
    const int ndim = take_sizes(&w, stack[2], sizes);
    if (w.error[0] == '\0') {
        make_value(&w, ndim, sizes, (int32_t)stack[3]);
    }
    run(&w, prepare_decode);
    const StableIValue result = give(&w, w.values, 0);
    end(&w);
    stack[0] = result;
}

static void decode_many_boxed(StableIValue *stack, UNUSED uint64_t nargs, UNUSED uint64_t nreturns)
{
    job w = {.error = ""};
    const size_t nbytes = length(&w, stack[0]), n = length(&w, stack[2]);

    begin(&w, nbytes > n ? nbytes : n);
    take_codec(&w, stack[1]);
    take_list(&w, w.bytes, nbytes, stack[0]);
    take_list(&w, w.values, n, stack[2]);
    if (nbytes != n) {
        refuse(&w, "gradckpt: decode_many takes as many payloads (%zu) as tensors to write (%zu)", nbytes, n);
    }
    run(&w, prepare_decode);
    end(&w);
}

static int implement(const char *key)
{
    TorchLibraryHandle lib;                      /* never freed: deleting it would unregister */

    return gck_torch.aoti_torch_library_init_impl("gradckpt", key, __FILE__, __LINE__, &lib)
        || gck_torch.torch_library_impl(lib, "encode", encode_boxed, build_version)
        || gck_torch.torch_library_impl(lib, "decode", decode_boxed, build_version)
        || gck_torch.torch_library_impl(lib, "encode_many", encode_many_boxed, build_version)
        || gck_torch.torch_library_impl(lib, "decode_many", decode_many_boxed, build_version);
}

const char *gck_ops_register(void)
{
    static atomic_flag registered = ATOMIC_FLAG_INIT;   /* per process, like the dispatcher */
    static const char *refused;
    TorchLibraryHandle lib;

    if (!atomic_flag_test_and_set(&registered)) {
        refused = gck_torch.aoti_torch_library_init_fragment("gradckpt", __FILE__, __LINE__, &lib)
            || gck_torch.aoti_torch_library_def(lib, "encode(Tensor x, str codec) -> Tensor")
            || gck_torch.aoti_torch_library_def(lib, "decode(Tensor payload, str codec, SymInt[] size,"
                                                     " ScalarType dtype) -> Tensor")
            || gck_torch.aoti_torch_library_def(lib, "encode_many(Tensor[] xs, str codec) -> Tensor[]")
            || gck_torch.aoti_torch_library_def(lib, "decode_many(Tensor[] payloads, str codec,"
                                                     " Tensor(a!)[] out) -> ()")
            ? "to define torch.ops.gradckpt"
            : implement("CPU") || implement("CUDA") ? "the kernels of torch.ops.gradckpt" : NULL;
    }
    return refused;
}

int gck_ops_add(const gck_device_kind *kind)
{
    return gck_device_kind_at(1) != kind && (gck_device_add(kind) < 0 || implement("PrivateUse1") != 0) ? -1 : 0;
}
