/* launch_probe.c: csrc/torch/tensor.c over codecs that only say whether their thread holds the GIL. */
#include "torch/tensor.c"

static int held = -1;
static const gck_codec codec = {.name = "probe", .dtypes = 7};

static int look(void) { return held = PyGILState_Check(), GCK_OK; }

int gck_encode_many(const gck_codec *c, const gck_tensor *x, const gck_bytes *payloads, const gck_how *how, int n,
                    gck_parallel_for *parallel)
{
    return (void)c, (void)x, (void)payloads, (void)how, (void)n, (void)parallel, look();
}

int64_t gck_count(const gck_codec *c, const gck_tensor *x, gck_parallel_for *parallel)
{
    return (void)c, (void)x, (void)parallel, 0;
}

int gck_decode_many(const gck_codec *c, const gck_bytes *payloads, const gck_tensor *out, int n,
                    gck_parallel_for *parallel)
{
    return (void)c, (void)payloads, (void)out, (void)n, (void)parallel, look();
}

#include "cuda_stubs.h"
#include "torch/device.c"

gck_abi gck_torch;                                     /* no symbol of it is called */

int gck_cuda_check(int *driver, int *runtime) { return *driver = *runtime = 13000, GCK_OK; }
const char *gck_status_text(int status) { return status == GCK_OK ? "no error" : "a reason"; }

void gck_torch_parallel_for(int64_t begin, int64_t end, int64_t grain, gck_body *body, void *ctx)
{
    (void)begin, (void)end, (void)grain, (void)body, (void)ctx;
}

/* Of n tensors the last lies on `device`, the others on the host.  Did the codec's thread hold the GIL? */
int holds_gil(int decode, int n, int device, int64_t numel)
{
    static gck_py py;
    gck_tensor x[4] = {0};
    const gck_bytes payloads[4] = {{NULL, NULL}};
    int status;

    for (int i = 0; i < n; i++) {
        x[i] = (gck_tensor){.numel = numel, .device = i == n - 1 ? device : -1};
    }
    held = -1;
    status = decode ? gck_run_decode(&py, &codec, payloads, x, n)
                    : gck_run_encode(&py, &codec, x, payloads, NULL, n);
    return status == 0 && PyGILState_Check() ? held : -2;
}
