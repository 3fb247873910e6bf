/* raw.cu: device kernels of raw, a bit-exact copy.  The payload is the values in the
 * contiguous order of the shape, nothing else. */
#include "codec/cuda/launch.cuh"

constexpr int VECTORS = 4;               /* of 16 bytes, per thread */

template <typename T> constexpr int BLOCK_VALUES = THREADS * VECTORS * (int)(16 / sizeof(T));

/* 64 bytes a thread, 64 KiB or more in flight per SM.  Element by element where one side
 * is not 16-byte aligned, and in the last block. */
template <typename T, bool ENCODE, typename WORK>
static __global__ void __launch_bounds__(THREADS)
copy_kernel(const __grid_constant__ WORK work)
{
    constexpr int MANY = BLOCK_VALUES<T>;
    unsigned block;
    const auto &job = job_of_block(work, &block);
    const int64_t first = (int64_t)block * MANY, left = job.x.numel - first;
    T *to = (ENCODE ? (T *)job.payload.codes : job.x.data) + first;
    const T *from = (ENCODE ? job.x.data : (const T *)job.payload.codes) + first;

    if (left >= MANY && ((uintptr_t)to | (uintptr_t)from) % 16 == 0) {
        uint4 q[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            q[k] = __ldg((const uint4 *)from + k * THREADS + threadIdx.x);
        }
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            ((uint4 *)to)[k * THREADS + threadIdx.x] = q[k];
        }
    } else {
        for (int i = (int)threadIdx.x; i < MANY && i < left; i += THREADS) {
            to[i] = from[i];
        }
    }
}

template <typename T, bool ENCODE>
static __global__ void __launch_bounds__(THREADS)
strided_copy_kernel(const __grid_constant__ job<strided<T>> job)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;

    if (i < job.x.numel) {
        int64_t run;
        T *at = job.x.data + offset_of(job.x, i, &run);
        if (ENCODE) {
            ((T *)job.payload.codes)[i] = *at;
        } else {
            *at = ((const T *)job.payload.codes)[i];
        }
    }
}

template <typename T, bool ENCODE, typename WORK>
static void launch_copy(const WORK &work, unsigned grid, cudaStream_t stream)
{
    GCK_LAUNCH((copy_kernel<T, ENCODE, WORK>), grid, THREADS, stream, work);
}

/* Of n tensors those whose values are Ts. */
template <typename T, bool ENCODE>
static int copy_as(const gck_tensor *t, const gck_bytes *payloads, int n)
{
    const cudaStream_t stream = (cudaStream_t)t->stream;
    const auto launch = [=](const auto &work, unsigned grid) { launch_copy<T, ENCODE>(work, grid, stream); };
    collector<dense<T>> all;

    for (int i = 0; i < n; i++) {
        job<strided<T>> one = {{}, payloads[i], {}};
        if (t[i].numel == 0 || (t[i].dtype == GCK_F32) != (sizeof(T) == 4)) {
            continue;
        }
        switch (strided_view(t + i, &one.x)) {
        case 0:
            all.add({{(T *)t[i].data, t[i].numel}, payloads[i], {}},
                    grid_for(t[i].numel, BLOCK_VALUES<T>), launch);
            break;
        case 1:
            GCK_LAUNCH((strided_copy_kernel<T, ENCODE>), grid_for(t[i].numel, THREADS), THREADS, stream, one);
            break;
        default:
            return GCK_E_DEVICE;
        }
    }
    all.flush(launch);
    return GCK_OK;
}

template <bool ENCODE>
static int copy_all(const gck_tensor *t, const gck_bytes *payloads, int n)
{
    if (!are_floats(t, n)) {
        return GCK_E_DTYPE;
    }
    return launch_on(t->device, [=]() {
        const int status = copy_as<uint32_t, ENCODE>(t, payloads, n);
        return status != GCK_OK ? status : copy_as<uint16_t, ENCODE>(t, payloads, n);
    });
}

extern "C" {

int gck_raw_encode_cuda(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n)
{
    (void)how;
    return copy_all<true>(x, to, n);
}

int gck_raw_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n)
{
    return copy_all<false>(out, from, n);
}

}
