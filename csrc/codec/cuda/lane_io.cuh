/* lane_io.cuh: a lane's 16 values as they lie in memory: 1, 2 or 4 to a word. */
#ifndef GRADCKPT_LANE_IO_CUH
#define GRADCKPT_LANE_IO_CUH

#include "codec/cuda/launch.cuh"

/* Blocks on an SM: 1536 threads have 48 KiB of 16-bit values in flight.  sm_75 holds 1024. */
constexpr int wide_blocks(gck_dtype dtype, bool contiguous)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    (void)dtype, (void)contiguous;
    return 4;
#else
    return contiguous && dtype != GCK_F32 ? 6 : 4;
#endif
}

/* Values i .. i + 15 of x; zeros past its end. */
template <typename VIEW, int N>
GCK_LANE_FN void load_words(const VIEW &x, int64_t i, uint32_t (&w)[N])
{
    constexpr int EACH = VALUES / N, BITS = 32 / EACH;

#pragma unroll
    for (int k = 0; k < N; k++) {
        w[k] = 0;
    }
    if (by_vectors(x, i)) {
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            const uint4 q = __ldg((const uint4 *)(x.data + i) + k / 4);
            w[k] = q.x, w[k + 1] = q.y, w[k + 2] = q.z, w[k + 3] = q.w;
        }
    } else {
        for_each_value<VALUES>(x, i, x.numel - i, [&](int j, const auto *at) {
            w[j / EACH] |= (uint32_t)*at << (BITS * (j % EACH));
        });
    }
}

template <typename VIEW, int N>
GCK_LANE_FN void store_words(const VIEW &x, int64_t i, const uint32_t (&w)[N])
{
    constexpr int EACH = VALUES / N, BITS = 32 / EACH;

    if (by_vectors(x, i)) {
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            ((uint4 *)(x.data + i))[k / 4] = make_uint4(w[k], w[k + 1], w[k + 2], w[k + 3]);
        }
    } else {
        for_each_value<VALUES>(x, i, x.numel - i, [&](int j, auto *at) {
            *at = (decltype(*at + 0u))(w[j / EACH] >> (BITS * (j % EACH)));
        });
    }
}

/* f(view) with the view of t that its strides ask for. */
template <typename T, typename F>
static int with_view(const gck_tensor *t, F f)
{
    const dense<T> flat = {(T *)t->data, t->numel};
    strided<T> view;

    switch (strided_view(t, &view)) {
    case 0:  f(flat); return GCK_OK;
    case 1:  f(view); return GCK_OK;
    default: return GCK_E_DEVICE;
    }
}

/* run(tensor, i) for each that is not empty, until one fails; its device is current. */
template <typename F>
static int for_each_tensor(const gck_tensor *t, int n, F run)
{
    int status = GCK_OK;

    for (int i = 0; i < n && status == GCK_OK; i++) {
        if (t[i].numel != 0) {                     /* an empty grid is a launch error */
            status = launch_on(t[i].device, [=]() { return run(t + i, i); });
        }
    }
    return status;
}

/* Blocks of 256 threads for all values. */
static inline unsigned grid_of(int64_t numel) { return grid_for(numel, (int64_t)THREADS * VALUES); }

/* The first value of this lane. */
GCK_LANE_FN int64_t first_of_lane(void) { return ((int64_t)blockIdx.x * THREADS + threadIdx.x) * VALUES; }

#endif
