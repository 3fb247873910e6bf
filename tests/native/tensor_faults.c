/* tensor_faults.c: csrc/torch/input.c and tensor.c over a torch and codecs that answer as they are told.
 *
 * Called with the GIL; exceptions arrive.  What a device, its driver and its codecs may say is said here without one. */
#include "torch/calls.c"
#include "torch/error.c"
#include "cuda_stubs.h"
#include "torch/device.c"
#include "torch/stream.c"
#include "torch/input.c"
#include "torch/tensor.c"

gck_abi gck_torch;                                     /* no symbol of it is called */

/* ---- the answers ---- */

int cuda_status, driver = 12020, runtime = 13000;      /* of gck_cuda_check() */
int work_status, worked, asked;                        /* of the codecs; how often they and the driver were called */
int shown = 0, device_type = 1, ndim = 1, streamless;  /* of DLPack: 1: as BufferError, 2: as MemoryError */
int has_data = 1;

static int held;                                       /* did the codec's thread hold the GIL? */
static int64_t sizes[GCK_MAX_DIM], strides[GCK_MAX_DIM];

static int show(void *object, gck_dl_tensor *out)
{
    for (int d = 0; d < ndim; d++) {
        sizes[d] = 2;
        strides[d] = 3;
    }
    *out = (gck_dl_tensor){has_data ? sizes : NULL, {device_type, 0}, ndim, {GCK_DL_FLOAT, 32, 1}, sizes, strides, 0};
    if (shown != 0) {
        PyErr_SetString(shown == 1 ? PyExc_BufferError : PyExc_MemoryError, "of torch");
    }
    return -(shown != 0);
}

static int stream_of(int32_t type, int32_t device, void **stream)
{
    *stream = NULL;
    if (streamless) {
        PyErr_SetString(PyExc_RuntimeError, "no stream");
    }
    return -streamless;
}

int gck_cuda_check(int *of_driver, int *of_runtime)
{
    return asked++, *of_driver = driver, *of_runtime = runtime, cuda_status;
}

static int work(void) { return worked++, held = PyGILState_Check(), work_status; }

int gck_encode_many(const gck_codec *c, const gck_tensor *x, const gck_bytes *payloads, const gck_how *how, int n,
                    gck_parallel_for *parallel)
{
    return work();
}

int64_t gck_count(const gck_codec *c, const gck_tensor *x, gck_parallel_for *parallel) { return 0; }

int gck_decode_many(const gck_codec *c, const gck_bytes *payloads, const gck_tensor *x, int n,
                    gck_parallel_for *parallel)
{
    return work();
}

const char *gck_status_text(int status) { return status > 0 ? "CUDA error cudaErrorX: why; do" : "a reason"; }
void gck_torch_parallel_for(int64_t begin, int64_t end, int64_t grain, gck_body *body, void *ctx) {}

/* ---- the questions ---- */

static gck_dl_exchange table = {.dltensor_from_py_object_no_sync = show, .current_work_stream = stream_of};

static int run_codec(gck_py *py, int decode, const gck_tensor *x, int n)
{
    const gck_codec codec = {.name = "int8", .dtypes = 7};
    const gck_bytes payloads[4] = {{NULL, NULL}};

    return decode ? gck_run_decode(py, &codec, payloads, x, n) : gck_run_encode(py, &codec, x, payloads, NULL, n);
}

/* Twice on this device, by a gck_py that has checked nothing yet.  What the second says. */
int call_codec(int decode, int device)
{
    const gck_tensor x = {.numel = 1, .device = device};
    gck_py py = {.dlpack = &table};
    int status = 0;

    worked = asked = 0;
    for (int i = 0; i < 2 && status >= 0; i++) {
        status = run_codec(&py, decode, &x, 1);
    }
    return status;
}

/* Of n tensors the last lies on `device`, the others on the host.  Did the codec's thread hold the GIL? */
int holds_gil(int decode, int n, int device, int64_t numel)
{
    static gck_py py;
    gck_tensor x[4] = {0};

    for (int i = 0; i < n; i++) {
        x[i] = (gck_tensor){.numel = numel, .device = i == n - 1 ? device : -1};
    }
    held = -1;
    return run_codec(&py, decode, x, n) == 0 && PyGILState_Check() ? held : -2;
}

/* The reason for which a tensor is kept, "compressed", or NULL with an exception.  x: any object. */
const char *skip_reason_of(PyObject *x)
{
    gck_py py = {.dlpack = &table, .Tensor = (PyObject *)Py_TYPE(x)};
    gck_tensor view;
    const int reason = gck_view_of(&py, x, &view);

    return reason < 0 ? NULL : gck_reason_text[reason];
}
