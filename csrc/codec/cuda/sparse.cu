/* sparse.cu: device kernels of sparse: sparse.h is the format, nonzeros.cuh makes bitmaps and places. */
#include "codec/cuda/nonzeros.cuh"

extern "C" int gck_raw_encode_cuda(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n);
extern "C" int gck_raw_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n);

template <typename T, typename VIEW>
static __global__ void __launch_bounds__(THREADS)
sparse_values_kernel(const __grid_constant__ VIEW x, const __grid_constant__ nonzeros_parts out,
                     const __grid_constant__ listener to)
{
    __shared__ T values[GCK_BLOCK];
    const uint64_t before = out.before[blockIdx.x];
    const uint32_t all = pack_block<false>(x, values);
    const bool fits = gck_sparse_fits(before, all, out.room);

    for (uint32_t i = threadIdx.x; fits && i < all; i += THREADS) {
        ((T *)(void *)out.values)[before + i] = values[i];
    }
    if (threadIdx.x == 0) {
        const bool last = blockIdx.x == gridDim.x - 1;
        report(to, !fits, last ? gck_part_of((int64_t)before + all, x.numel) : 0u);
    }
}

template <typename T, typename VIEW>
static __global__ void __launch_bounds__(THREADS)
sparse_decode_kernel(const __grid_constant__ nonzeros_parts in, gck_dtype dtype, const __grid_constant__ VIEW x)
{
    __shared__ T values[GCK_BLOCK];
    __shared__ uint32_t of_warp[WARPS];
    const uint64_t before = in.before[blockIdx.x];
    const uint16_t *bitmap = bits_of_lane(in, x.numel);
    const uint32_t bits = bitmap != NULL ? *bitmap : 0u;
    uint32_t w[lane_words<T>::N], all;
    const uint32_t at = sum_before((uint32_t)__popc(bits), of_warp, &all);
    const bool fits = gck_sparse_fits(before, all, in.room);

    for (uint32_t i = threadIdx.x; i < all; i += THREADS) {
        values[i] = fits ? ((const T *)(void *)in.values)[before + i] : (T)gck_quiet_nan(dtype);
    }
    __syncthreads();
    unpack_lane(values, bits, at, w);
    store_words(x, first_of_lane(), w);
}

/* The payload is the tensor, which says nothing about the number of values. */
static __global__ void sparse_whole_kernel(const __grid_constant__ listener to)
{
    if (threadIdx.x == 0) {
        report(to, false);
    }
}

/* ---- launchers ---- */

/* The parts of the payload of t.  1: it is the tensor; 0; or an error. */
static int parts_of(const gck_tensor *t, const void *payload, nonzeros_parts *parts)
{
    if (t->room == 0 || t->room >= t->numel * (int64_t)gck_itemsize(t->dtype)) {
        return 1;
    }
    *parts = gck_sparse_parts_of(payload, t->numel, t->dtype, t->room);
    return parts->room < 0 ? (int)GCK_E_RANGE : 0;
}

template <typename T, typename VIEW>
static void launch_encode(const VIEW &x, T *, const nonzeros_parts &parts, const listener &to, cudaStream_t stream)
{
    launch_places<T, false>(x, parts, stream);
    GCK_LAUNCH((sparse_values_kernel<T, VIEW>), grid_of(x.numel), THREADS, stream, x, parts, to);
}

template <typename T, typename VIEW>
static void launch_decode(const nonzeros_parts &parts, gck_dtype dtype, const VIEW &x, T *, cudaStream_t stream)
{
    GCK_LAUNCH((sparse_decode_kernel<T, VIEW>), grid_of(x.numel), THREADS, stream, parts, dtype, x);
}

static int encode(const gck_tensor *t, void *payload, const gck_how *how, int i)
{
    const cudaStream_t stream = (cudaStream_t)t->stream;
    const gck_bytes bytes = {payload, NULL};
    nonzeros_parts parts;
    listener to;
    const int whole = parts_of(t, payload, &parts), status = whole < 0 ? whole : listen(how, i, &to);

    if (status != GCK_OK || whole == 0) {
        return status != GCK_OK ? status : with_floats(t, [=](const auto &x, auto) {
            launch_encode(x, x.data, parts, to, stream);
        });
    }
    const int copied = gck_raw_encode_cuda(t, &bytes, NULL, 1);
    if (copied == GCK_OK) {
        GCK_LAUNCH(sparse_whole_kernel, 1, 32, stream, to);
    }
    return copied;
}

static int decode(const gck_bytes *from, const gck_tensor *t)
{
    nonzeros_parts parts;
    const int whole = parts_of(t, from->codes, &parts);

    return whole < 0 ? whole : whole != 0 ? gck_raw_decode_cuda(from, t, 1)
                                          : with_floats(t, [=](const auto &x, auto) {
        launch_decode(parts, t->dtype, x, x.data, (cudaStream_t)t->stream);
    });
}

extern "C" {

int gck_sparse_encode_cuda(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n)
{
    return for_each_tensor(x, n, [=](const gck_tensor *t, int i) { return encode(t, to[i].codes, how, i); });
}

int gck_sparse_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n)
{
    return for_each_tensor(out, n, [=](const gck_tensor *t, int i) { return decode(from + i, t); });
}

}
