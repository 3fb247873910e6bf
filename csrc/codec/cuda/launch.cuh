/* launch.cuh: what the device kernels share: views, launches, the lanes of a group.
 *
 * A group of 128 values is 8 lanes x 16 consecutive values: bits 0..3 of a value's
 * index choose a register, bits 4..6 a lane.  A warp carries four groups, holds them
 * in registers and touches memory once per byte: 1536 threads x 32 bytes (float32:
 * 768 x 64) keep the 48 KiB in flight that an SM needs.
 *
 * tests/native compiles the same text as C++; everything that is not C++ goes
 * through the macros below and through ptx.cuh. */
#ifndef GRADCKPT_LAUNCH_CUH
#define GRADCKPT_LAUNCH_CUH

#ifndef GCK_EMULATE_CUDA
#include <cuda_runtime.h>
#define GCK_START(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#endif

/* Nothing is queued behind a launch that failed. */
#define GCK_LAUNCH(kernel, grid, block, stream, ...)                 \
    do {                                                             \
        if (cudaPeekAtLastError() == cudaSuccess) {                  \
            GCK_START(kernel, grid, block, stream, __VA_ARGS__);     \
        }                                                            \
    } while (0)

#include "codec/format/group.h"
#include "codec/cuda/ptx.cuh"

#define GCK_LANE_FN static __device__ __forceinline__

constexpr int THREADS = 256;
constexpr int VALUES = 16;               /* per lane */
constexpr int LANES = GCK_GROUP / VALUES;
constexpr int GROUPS_PER_BLOCK = THREADS / LANES;
constexpr unsigned ALL_LANES = 0xFFFFFFFFu;

/* ---- views, passed to kernels by value ---- */

/* The word that holds a value of the dtype. */
template <gck_dtype DTYPE> struct element          { typedef uint16_t type; };
template <>                struct element<GCK_F32> { typedef uint32_t type; };

/* Values one after the other. */
template <typename T> struct dense {
    enum { CONTIGUOUS = 1 };
    T      *data;
    int64_t numel;
};

/* Anything else.  A view of more dimensions, after those that continue each other
 * are merged, has no kernel: GCK_E_DEVICE, and the caller keeps the tensor. */
enum { STRIDED_DIMS = 8 };
template <typename T> struct strided {
    enum { CONTIGUOUS = 0 };
    T      *data;
    int64_t numel;
    int     ndim;
    int64_t size[STRIDED_DIMS];
    int64_t stride[STRIDED_DIMS];
};

/* Where value i is, and in *run how many values from i on lie one last stride apart. */
template <typename T>
GCK_LANE_FN int64_t offset_of(const strided<T> &x, int64_t i, int64_t *run)
{
    int64_t offset = 0;

    for (int d = x.ndim - 1; d >= 0; d--) {
        const int64_t outer = i / x.size[d], at = i - outer * x.size[d];
        offset += at * x.stride[d];
        *run = d == x.ndim - 1 ? x.size[d] - at : *run;
        i = outer;
    }
    return offset;
}

/* The same, not inlined: for where it is unrolled. */
template <typename T>
static __device__ __noinline__ int64_t far_offset_of(const strided<T> &x, int64_t i, int64_t *run)
{
    return offset_of(x, i, run);
}

/* f(j, address of value i + j) for each of the first `count` of the N values from i on.
 * Unrolled, so that j may index registers. */
template <int N, typename T, typename F>
GCK_LANE_FN void for_each_value(const strided<T> &x, int64_t i, int64_t count, F f)
{
    int64_t offset = 0, run = 0;

#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j < count) {
            if (run == 0) {
                offset = far_offset_of(x, i + j, &run);
            }
            f(j, x.data + offset);
            offset += x.stride[x.ndim - 1];
            run--;
        }
    }
}

template <int N, typename T, typename F>
GCK_LANE_FN void for_each_value(const dense<T> &x, int64_t i, int64_t count, F f)
{
    const int few = count < N ? (int)count : N;
    T *first = x.data + i;

#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j < few) {
            f(j, first + j);
        }
    }
}

/* Four words at a time where the view allows. */
template <typename T>
GCK_LANE_FN bool by_vectors(const dense<T> &x, int64_t i)
{
    return i + VALUES <= x.numel && (uintptr_t)x.data % 16 == 0;
}

template <typename T>
GCK_LANE_FN bool by_vectors(const strided<T> &, int64_t) { return false; }

/* ---- lanes ---- */

/* What the lanes have whose numbers differ in bits FIRST to END, joined, in each of them. */
template <int FIRST, int END, typename T, typename F>
GCK_LANE_FN T across_lanes(T mine, F join)
{
#pragma unroll
    for (int lanes = FIRST; lanes < END; lanes *= 2) {
        mine = join(mine, __shfl_xor_sync(ALL_LANES, mine, lanes));
    }
    return mine;
}

/* The largest of the 8 lanes of a group, and their sum. */
GCK_LANE_FN uint32_t group_max(uint32_t amax)
{
    return across_lanes<1, LANES>(amax, [](uint32_t a, uint32_t b) { return b > a ? b : a; });
}

GCK_LANE_FN int group_sum(int n)
{
    return across_lanes<1, LANES>(n, [](int a, int b) { return a + b; });
}

/* The sum of `mine` of the threads before this one, and in *all of all of them.  Every thread of the
 * block comes here; before it does so again, they meet. */
constexpr int WARPS = THREADS / 32;

GCK_LANE_FN uint32_t sum_before(uint32_t mine, uint32_t (&of_warp)[WARPS], uint32_t *all)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    uint32_t sum = mine;

    if (__ballot_sync(ALL_LANES, mine != 0) != 0) {
#pragma unroll
        for (int back = 1; back < 32; back *= 2) {
            const uint32_t other = __shfl_sync(ALL_LANES, sum, lane >= back ? lane - back : lane);
            sum += lane >= back ? other : 0u;
        }
    }
    if (lane == 31) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    uint32_t before = sum - mine;
    *all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        before += w < warp ? of_warp[w] : 0u;
        *all += of_warp[w];
    }
    return before;
}

/* Bits 0 to 3 as the lowest bits of bytes, and back. */
GCK_LANE_FN uint32_t to_bytes(uint32_t bits) { return (bits & 0xFu) * 0x00204081u & 0x01010101u; }
GCK_LANE_FN uint32_t from_bytes(uint32_t bytes) { return (bytes & 0x01010101u) * 0x01020408u >> 24 & 0xFu; }

/* One group per 8 lanes, and no loop: it would cost registers, and a grid of 2^31 - 1
 * blocks holds 2^43 values.  All lanes of a warp meet in the shuffles; those past the
 * last group carry zeros and store nothing. */
GCK_LANE_FN int64_t group_of_lane(unsigned block)
{
    return (int64_t)block * GROUPS_PER_BLOCK + (int)threadIdx.x / LANES;
}

/* ---- launchers ---- */

/* Merge dimensions that continue each other.  1: *x is filled in; 0: x is contiguous;
 * -1: too many dimensions remain. */
template <typename T>
static int strided_view(const gck_tensor *t, strided<T> *x)
{
    int n = 0;                                     /* built from the last dimension on */

    x->data = (T *)t->data;
    x->numel = t->numel;
    for (int d = t->strides == NULL ? -1 : t->ndim - 1; d >= 0; d--) {
        if (t->sizes[d] == 1) {
            continue;
        }
        if (n > 0 && t->strides[d] == x->stride[n - 1] * x->size[n - 1]) {
            x->size[n - 1] *= t->sizes[d];
            continue;
        }
        if (n == STRIDED_DIMS) {
            return -1;
        }
        x->size[n] = t->sizes[d];
        x->stride[n++] = t->strides[d];
    }
    for (int a = 0, b = n - 1; a < b; a++, b--) {
        const int64_t size = x->size[a], stride = x->stride[a];
        x->size[a] = x->size[b], x->stride[a] = x->stride[b];
        x->size[b] = size, x->stride[b] = stride;
    }
    x->ndim = n;
    return n > 1 || (n == 1 && x->stride[0] != 1);
}

/* Blocks for `work` items of which one block does `per_block`. */
static inline unsigned grid_for(int64_t work, int64_t per_block)
{
    const int64_t blocks = work / per_block + (work % per_block != 0);

    return blocks <= 0x7FFFFFFF ? (unsigned)blocks : 0u;     /* 0: the launch reports it */
}

static inline bool are_floats(const gck_tensor *t, int n)
{
    bool all = true;

    for (int i = 0; i < n; i++) {
        all &= t[i].dtype == GCK_F32 || t[i].dtype == GCK_F16 || t[i].dtype == GCK_BF16;
    }
    return all;
}

/* Calls launch() with `device` current and never synchronises.  The first thing that went wrong.
 *
 * CUDA remembers an error until it is asked for the last one, from any cause: so it is asked on
 * every path, or the next good launch would answer for this one.  What others left there is raised
 * here, as torch's launches do, and nothing is launched.
 *
 * CUDA loads a kernel at its first launch, which a capture in global mode forbids to every thread: so
 * the mode of this thread is relaxed meanwhile. */
template <typename F>
static int launch_on(int device, F launch)
{
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    int before = device, status = (int)cudaPeekAtLastError();

    if (status == GCK_OK) {
        status = (int)cudaGetDevice(&before);
    }
    if (status == GCK_OK && before != device) {
        status = (int)cudaSetDevice(device);
    }
    if (status == GCK_OK && (status = (int)cudaThreadExchangeStreamCaptureMode(&mode)) == GCK_OK) {
        status = launch();
        (void)cudaThreadExchangeStreamCaptureMode(&mode);
    }
    const int back = before != device ? (int)cudaSetDevice(before) : GCK_OK;
    const int last = (int)cudaGetLastError();
    return status != GCK_OK ? status : back != GCK_OK ? back : last;
}

/* ---- several tensors in one launch ---- */

/* A tensor and its payload. */
template <typename VIEW> struct job {
    typedef VIEW view;
    VIEW       x;
    gck_bytes  payload;
    gck_dither dither;                   /* for kernels that round stochastically */
};

/* Blocks first[k] .. first[k + 1] - 1 work at item k.  Where there is none, first[k] is
 * a block that no grid has. */
enum { MOST_JOBS = 32 };
template <typename VIEW> struct jobs {
    typedef VIEW view;
    unsigned  first[MOST_JOBS];
    job<VIEW> item[MOST_JOBS];
};

/* The job of this block, and the block's place in it.  One job alone pays nothing. */
template <typename VIEW>
GCK_LANE_FN const job<VIEW> &job_of_block(const job<VIEW> &work, unsigned *block)
{
    *block = blockIdx.x;
    return work;
}

template <typename VIEW>
GCK_LANE_FN const job<VIEW> &job_of_block(const jobs<VIEW> &work, unsigned *block)
{
    unsigned k = 0;

#pragma unroll 1
    for (unsigned step = MOST_JOBS / 2; step > 0; step /= 2) {
        k += work.first[k + step] <= blockIdx.x ? step : 0;
    }
    *block = blockIdx.x - work.first[k];
    return work.item[k];
}

/* The job of this lane, and the number of its group in the tensor. */
template <typename VIEW> struct lane_work {
    const job<VIEW> &one;
    int64_t          g;
};

template <typename WORK>
GCK_LANE_FN lane_work<typename WORK::view> work_of_lane(const WORK &work)
{
    unsigned block;
    const auto &one = job_of_block(work, &block);

    return {one, group_of_lane(block)};
}

/* Collects jobs on the host; launch(work, grid) gets a job<VIEW> or a jobs<VIEW>. */
template <typename VIEW>
struct collector {
    jobs<VIEW> many;
    unsigned   blocks = 0;
    int        count = 0;

    template <typename F>
    void add(const job<VIEW> &one, unsigned grid, F launch)
    {
        if (count == MOST_JOBS || grid > 0x7FFFFFFFu - blocks) {
            flush(launch);
        }
        if (grid == 0) {
            launch(one, grid);                     /* which reports it */
            return;
        }
        many.first[count] = blocks;
        many.item[count++] = one;
        blocks += grid;
    }

    template <typename F>
    void flush(F launch)
    {
        if (count == 1) {
            launch(many.item[0], blocks);
        } else if (count > 1) {
            for (int k = count; k < MOST_JOBS; k++) {
                many.first[k] = 0xFFFFFFFFu;
            }
            launch(many, blocks);
        }
        count = 0;
        blocks = 0;
    }
};

/* ---- a lane's 16 values as they lie in memory: 1, 2 or 4 to a word ---- */

/* Blocks on an SM: 1536 threads have 48 KiB of 16-bit values in flight.  sm_75 holds 1024.  simple: they need few
 * registers. */
constexpr int wide_blocks(gck_dtype dtype, bool simple)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    (void)dtype, (void)simple;
    return 4;
#else
    return simple && dtype != GCK_F32 ? 6 : 4;
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

/* The same of a floating dtype: f(view, the dtype as a type). */
template <gck_dtype DTYPE> struct constant { enum : int { VALUE = DTYPE }; };

template <typename F>
static int with_floats(const gck_tensor *t, F f)
{
    switch (t->dtype) {
    case GCK_F32:  return with_view<uint32_t>(t, [=](const auto &x) { f(x, constant<GCK_F32>()); });
    case GCK_F16:  return with_view<uint16_t>(t, [=](const auto &x) { f(x, constant<GCK_F16>()); });
    case GCK_BF16: return with_view<uint16_t>(t, [=](const auto &x) { f(x, constant<GCK_BF16>()); });
    default:       return GCK_E_DTYPE;
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
