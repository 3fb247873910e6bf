/* raw.cu: device kernels of raw, a bit-exact copy.  The payload is the values in the
 * contiguous order of the shape, nothing else. */
#include "kernel.cuh"

constexpr int VECTORS = 4;               /* of 16 bytes, per thread */

/* 64 bytes a thread, 64 KiB or more in flight per SM.  Element by element where one side is not 16-byte
 * aligned, and for the last ones. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
copy_kernel(T *__restrict__ to, const T *__restrict__ from, int64_t numel)
{
    const bool aligned = ((uintptr_t)to | (uintptr_t)from) % 16 == 0;
    const int64_t nvectors = aligned ? numel / (int64_t)(16 / sizeof(T)) : 0;
    const int64_t nthreads = (int64_t)gridDim.x * THREADS;

    const int64_t mine = (int64_t)blockIdx.x * THREADS * VECTORS + threadIdx.x;
    uint4 q[VECTORS];

#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const int64_t at = mine + k * THREADS;
        q[k] = at < nvectors ? __ldg((const uint4 *)from + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const int64_t at = mine + k * THREADS;
        if (at < nvectors) {
            ((uint4 *)to)[at] = q[k];
        }
    }
    for (int64_t i = nvectors * (int64_t)(16 / sizeof(T)) + (int64_t)blockIdx.x * THREADS + threadIdx.x; i < numel;
         i += nthreads) {
        to[i] = from[i];
    }
}

template <typename T, bool ENCODE>
static __global__ void __launch_bounds__(THREADS)
strided_copy_kernel(const __grid_constant__ strided<T> x, T *payload)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;

    if (i < x.numel) {
        int64_t run;
        T *at = x.data + offset_of(x, i, &run);
        if (ENCODE) {
            payload[i] = *at;
        } else {
            *at = payload[i];
        }
    }
}

template <typename T, bool ENCODE>
static int copy_as(const gck_tensor *t, void *payload)
{
    const cudaStream_t stream = (cudaStream_t)t->stream;
    const int64_t per_block = (int64_t)THREADS * VECTORS * (int64_t)(16 / sizeof(T));
    strided<T> view;

    switch (strided_view(t, &view)) {
    case 0:
        GCK_LAUNCH((copy_kernel<T>), grid_for(t->numel, per_block), THREADS, stream,
                   (T *)(ENCODE ? payload : t->data), (const T *)(ENCODE ? t->data : payload), t->numel);
        return GCK_OK;
    case 1:
        GCK_LAUNCH((strided_copy_kernel<T, ENCODE>), grid_for(t->numel, THREADS), THREADS, stream,
                   view, (T *)payload);
        return GCK_OK;
    default:
        return GCK_E_DEVICE;
    }
}

template <bool ENCODE>
static int raw_copy(const gck_tensor *t, void *payload)
{
    if (t->numel == 0) {
        return GCK_OK;
    }
    return launch_on(t->device, [=]() {
        switch (t->dtype) {
        case GCK_F32:  return copy_as<uint32_t, ENCODE>(t, payload);
        case GCK_F16:  return copy_as<uint16_t, ENCODE>(t, payload);
        case GCK_BF16: return copy_as<uint16_t, ENCODE>(t, payload);
        default:       return (int)GCK_E_DTYPE;
        }
    });
}

template <bool ENCODE>
static int raw_copies(const gck_tensor *t, void *const *payloads, int n)
{
    for (int i = 0; i < n; i++) {
        const int status = raw_copy<ENCODE>(t + i, payloads[i]);
        if (status != GCK_OK) {
            return status;
        }
    }
    return GCK_OK;
}

extern "C" {
int gck_raw_encode_cuda(const gck_tensor *x, void *const *payloads, const gck_how *how, int n)
{
    (void)how;
    return raw_copies<true>(x, payloads, n);
}

/* The payloads are only read: strided_copy_kernel<T, false> never writes to them. */
int gck_raw_decode_cuda(const void *const *payloads, const gck_tensor *out, int n)
{
    return raw_copies<false>(out, (void *const *)payloads, n);
}
}
