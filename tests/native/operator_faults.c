/* operator_faults.c: csrc/torch/ops.c over a pretended torch, each function of which can be made to fail.
 *
 * sweep() calls one operator again and again; in call k the k-th answer of torch is an error.
 * An operator then has to raise in words of its own, give nothing back, and let go of what it
 * was given: torch would follow a NULL.  aoti_torch_check() leaves by longjmp, as an exception does. */
#include <setjmp.h>

#include "cuda_stubs.h"
#include "torch/device.c"
#include "torch/ops.c"

int gck_cuda_check(int *driver, int *runtime) { return *driver = *runtime = 13000, GCK_OK; }

gck_abi gck_torch;

typedef struct {
    int     ndim, dtype, cuda;
    int64_t sizes[2], strides[2];
    char   *memory;
} tensor;

enum { FLOAT32 = 6, FLOAT16 = 5, BFLOAT16 = 15, BOOL = 11, UINT8 = 0, CPU = 0, CUDA = 1 };
static int     answers, failing, late;    /* answers so far; the number of the wrong one; how many came after it */
static int     alive;                     /* tensors, strings and lists */
static int     streams = 1;               /* this torch has CUDA streams */
static int     launched;                  /* codecs called */
static int     shifted;                   /* bytes between an aligned place and a payload */
static int     apart;                     /* what is decoded into is on the other device */
static char    raised[512];
static jmp_buf out;

static int wrong(void)
{
    late += failing > 0 && answers >= failing;
    return ++answers == failing;
}

static tensor *tensor_new(int dtype, int cuda, int ndim, const int64_t *sizes)
{
    tensor *t = calloc(1, sizeof *t);

    *t = (tensor){ndim, dtype, cuda, {0}, {0}, calloc(1, 8192)};
    for (int64_t d = ndim - 1, step = 1; d >= 0; step *= sizes[d--]) {
        t->sizes[d] = sizes[d];
        t->strides[d] = step;
    }
    alive++;
    return t;
}

/* ---- torch ---- */

static int32_t on_cpu(void) { return CPU; }
static int32_t on_cuda(void) { return CUDA; }
static int32_t float32(void) { return FLOAT32; }
static int32_t float16(void) { return FLOAT16; }
static int32_t bfloat16(void) { return BFLOAT16; }
static int32_t boolean(void) { return BOOL; }
static int32_t uint8(void) { return UINT8; }
static int32_t get_dim(AtenTensorHandle t, int64_t *n) { return wrong() ? 1 : (*n = ((tensor *)t)->ndim, 0); }
static int32_t get_sizes(AtenTensorHandle t, int64_t **s) { return wrong() ? 1 : (*s = ((tensor *)t)->sizes, 0); }
static int32_t get_strides(AtenTensorHandle t, int64_t **s) { return wrong() ? 1 : (*s = ((tensor *)t)->strides, 0); }
static int32_t get_dtype(AtenTensorHandle t, int32_t *d) { return wrong() ? 1 : (*d = ((tensor *)t)->dtype, 0); }
static int32_t device_type(AtenTensorHandle t, int32_t *d) { return wrong() ? 1 : (*d = ((tensor *)t)->cuda, 0); }
static int32_t device_index(AtenTensorHandle t, int32_t *d) { return wrong() ? 1 : (*d = -!((tensor *)t)->cuda, 0); }
static int32_t data(AtenTensorHandle t, void **p) { return wrong() ? 1 : (*p = ((tensor *)t)->memory, 0); }
static int32_t stream_of(int32_t index, void **stream) { return wrong() ? 1 : (*stream = NULL, 0); }

static int32_t const_data(AtenTensorHandle t, const void **p)
{
    *p = ((tensor *)t)->memory + (((tensor *)t)->dtype == UINT8 ? shifted : 0);
    return wrong();
}

static int32_t get_numel(AtenTensorHandle t, int64_t *n)
{
    *n = 1;
    for (int d = 0; d < ((tensor *)t)->ndim; d++) {
        *n *= ((tensor *)t)->sizes[d];
    }
    return wrong();
}

static int32_t empty_strided(int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t type,
                             int32_t index, AtenTensorHandle *owned)
{
    return wrong() ? 1 : (*owned = (AtenTensorHandle)tensor_new(dtype, type, (int)ndim, sizes), 0);
}

static int32_t delete_tensor(AtenTensorHandle t)
{
    free(((tensor *)t)->memory);
    free((void *)t);
    alive--;
    return 0;
}

static void check(bool condition, const char *function, const char *file, uint32_t line, const char *message)
{
    if (!condition) {
        snprintf(raised, sizeof raised, "%s", message);
        longjmp(out, 1);
    }
}

static int32_t string_text(StringHandle s, const char **text) { return wrong() ? 1 : (*text = (const char *)s, 0); }
static int32_t string_delete(StringHandle s) { return alive--, 0; }

typedef struct { size_t n; StableIValue item[4]; } list;
static int32_t list_size(StableListHandle l, size_t *n) { return *n = ((list *)l)->n, 0; }

/* What an operator is given is taken in any case. */
static int32_t sizes_get(StableListHandle l, size_t i, StableIValue *v)
{
    return *v = ((list *)l)->item[i], ++answers == failing;
}

static int32_t list_get(StableListHandle l, size_t i, StableIValue *v)
{
    sizes_get(l, i, v);
    return answers == failing ? delete_tensor((AtenTensorHandle)(uintptr_t)*v), 1 : 0;
}

static int32_t list_new(size_t n, StableListHandle *l)
{
    return wrong() ? 1 : (alive++, *l = calloc(1, sizeof(list)), 0);
}

static int32_t list_push(StableListHandle handle, StableIValue v)
{
    list *l = (list *)handle;

    return wrong() ? 1 : (l->item[l->n++] = v, 0);
}

static int32_t list_delete(StableListHandle l)
{
    free((void *)l);
    alive--;
    return 0;
}

/* ---- the codecs ---- */

static const gck_codec codec = {.name = "int8", .dtypes = 7, .size = {{1, 2, 0}, {1, 2, 0}, {1, 2, 0}}};
const gck_codec *gck_codec_find(const char *name) { return strcmp(name, "int8") == 0 ? &codec : NULL; }
gck_lengths gck_lengths_of(const gck_codec *c, const gck_tensor *x) { return (gck_lengths){x->numel, 2}; }
const char *gck_status_text(int status) { return status == 0 ? "no error" : "a reason"; }

static int work(void) { return launched++, wrong() ? GCK_E_DEVICE : GCK_OK; }

int gck_encode_many(const gck_codec *c, const gck_tensor *x, const gck_bytes *payloads, const gck_how *how, int n,
                    gck_parallel_for *parallel)
{
    return work();
}

int gck_decode_many(const gck_codec *c, const gck_bytes *payloads, const gck_tensor *x, int n,
                    gck_parallel_for *parallel)
{
    return work();
}

void gck_torch_parallel_for(int64_t begin, int64_t end, int64_t grain, gck_body *body, void *ctx) {}

/* ---- the sweep ---- */

static StableIValue value_of(const void *p) { return (StableIValue)(uintptr_t)p; }

static StableIValue name_new(void) { return alive++, value_of("int8"); }

static StableIValue tensor_value(int dtype, int cuda, int64_t n) { return value_of(tensor_new(dtype, cuda, 1, &n)); }

static StableIValue list_value(int count, int dtype, int cuda, int64_t n)
{
    list *l = calloc(1, sizeof *l);

    for (alive++; l->n < (size_t)count;) {
        l->item[l->n++] = dtype < 0 ? (StableIValue)n : tensor_value(dtype, cuda, n);
    }
    return value_of(l);
}

static void result_delete(int is_list, StableIValue value)
{
    list *l = (list *)(uintptr_t)value;

    for (size_t i = 0; is_list && i < l->n; i++) {
        delete_tensor((AtenTensorHandle)(uintptr_t)l->item[i]);
    }
    if (is_list) {
        list_delete((StableListHandle)l);
    } else {
        delete_tensor((AtenTensorHandle)(uintptr_t)value);
    }
}

/* One call; offset: of the payload's memory.  0: it gave a result, 1: it raised, < 0: neither, or both, or it leaks, or
 * it asked on after an error. */
static int call(int operator, int cuda, int offset)
{
    StableIValue stack[4] = {0};

    answers = launched = late = 0;
    raised[0] = '\0';
    gck_torch.torch_list_get_item = operator == 1 ? sizes_get : list_get;
    gck_torch.aoti_torch_get_current_cuda_stream = streams ? stream_of : NULL;
    stack[0] = operator == 0 ? tensor_value(FLOAT32, cuda, 100) : operator == 1 ? tensor_value(UINT8, cuda, 102)
             : list_value(2, operator == 2 ? FLOAT32 : UINT8, cuda, operator == 2 ? 100 : 102);
    shifted = offset;
    stack[1] = name_new();
    stack[2] = operator == 1 ? list_value(1, -1, 0, 100) : operator == 3 ? list_value(2, FLOAT32, cuda ^ apart, 100) : 0;
    stack[3] = FLOAT32;
    const StableIValue given = stack[0];
    if (setjmp(out) == 0) {
        (operator == 0 ? encode_boxed : operator == 1 ? decode_boxed : operator == 2 ? encode_many_boxed
                                                                                       : decode_many_boxed)(stack, 4, 1);
    }
    const int threw = raised[0] != '\0';
    if (!threw && operator < 3) {
        if (stack[0] == 0 || (operator < 2 && stack[0] == given)) {
            return -1;                             /* neither */
        }
        result_delete(operator == 2, stack[0]);
    }
    return alive != 0 ? -2 : late != 0 ? -3 : threw;
}

static void set_up(void)
{
    gck_torch = (gck_abi){
        .aoti_torch_device_type_cpu = on_cpu, .aoti_torch_device_type_cuda = on_cuda, .aoti_torch_dtype_float32 = float32,
        .aoti_torch_dtype_float16 = float16, .aoti_torch_dtype_bfloat16 = bfloat16,
        .aoti_torch_dtype_bool = boolean, .aoti_torch_dtype_uint8 = uint8, .aoti_torch_get_dim = get_dim,
        .aoti_torch_get_numel = get_numel, .aoti_torch_get_sizes = get_sizes, .aoti_torch_get_strides = get_strides,
        .aoti_torch_get_dtype = get_dtype, .aoti_torch_get_device_type = device_type,
        .aoti_torch_get_device_index = device_index, .aoti_torch_empty_strided = empty_strided,
        .aoti_torch_delete_tensor_object = delete_tensor, .aoti_torch_check = check,
        .torch_get_const_data_ptr = const_data, .torch_get_mutable_data_ptr = data, .torch_list_size = list_size,
        .torch_new_list_reserve_size = list_new, .torch_list_push_back = list_push, .torch_delete_list = list_delete,
        .torch_string_c_str = string_text, .torch_delete_string = string_delete,
    };
    streams = 1;
}

/* How many answers of torch one call needs when all are right; negative: call -result went wrong, `raised` says how. */
int sweep(int operator, int cuda)
{
    set_up();
    failing = alive = 0;
    if (call(operator, cuda, 0) != 0) {
        return 0;
    }
    const int all = answers;
    for (failing = 1; failing <= all; failing++) {
        alive = 0;
        if (call(operator, cuda, 0) != 1 || strncmp(raised, "gradckpt: ", 10) != 0) {
            return -failing;
        }
    }
    return all;
}

/* 1: refused before any codec was called. */
static int is_refused(int operator, int cuda, int offset, int on_another)
{
    set_up();
    failing = alive = 0;
    apart = on_another;
    const int threw = call(operator, cuda, offset);
    apart = 0;
    return threw == 1 && launched == 0;
}

/* A payload whose memory begins `offset` bytes after an aligned place. */
int misaligned(int operator, int cuda, int offset) { return is_refused(operator, cuda, offset, 0); }

/* decode_many() into tensors of the other device. */
int on_two_devices(int cuda) { return is_refused(3, cuda, 0, 1); }

/* A torch without CUDA streams (built for ROCm), and CUDA tensors.  What call() returns. */
int without_streams(int operator)
{
    set_up();
    failing = alive = streams = 0;
    return call(operator, 1, 0);
}

const char *message(void) { return raised; }
