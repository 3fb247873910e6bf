/* kernel.cuh: what the device kernels share: views, the work of one lane, launches.
 *
 * A group of 128 values is 8 lanes x 16 consecutive values: bits 0..3 of a value's
 * index choose a register, bits 4..6 a lane.  A warp carries four groups, holds them
 * in registers and touches memory once per byte: 1536 threads x 32 bytes (float32:
 * 768 x 64) keep the 48 KiB in flight that an SM needs.
 *
 * A .cu file includes this, defines lane_encode() and lane_decode() for its formats,
 * and calls run_groups().  tests/emulation compiles the same text as C++; everything
 * that is not C++ goes through the macros below. */
#ifndef GRADCKPT_KERNEL_CUH
#define GRADCKPT_KERNEL_CUH

#ifndef GCK_EMULATE_CUDA
#include <cuda_runtime.h>
#define GCK_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#endif

#include "group.h"

#define GCK_LANE_FN static __device__ __forceinline__

constexpr int THREADS = 256;
constexpr int VALUES = 16;               /* per lane */
constexpr int LANES = GCK_GROUP / VALUES;
constexpr int GROUPS_PER_BLOCK = THREADS / LANES;
constexpr unsigned ALL_LANES = 0xFFFFFFFFu;

static inline int64_t groups_of(int64_t numel) { return numel / GCK_GROUP + (numel % GCK_GROUP != 0); }

/* Blocks an SM must hold to have 48 KiB in flight: what bounds the registers.  sm_75
 * holds 1024 threads only; strided kernels are bound by latency, not by this. */
constexpr int blocks_per_sm(gck_dtype dtype, bool contiguous)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    const int wide = 4;
#else
    const int wide = 6;
#endif
    return !contiguous ? 2 : dtype == GCK_F32 ? 4 : wide;
}

/* ---- views, passed to kernels by value ---- */

/* What group.h reads and writes a value of the dtype as. */
template <gck_dtype DTYPE> struct element          { typedef uint16_t type; };
template <>                struct element<GCK_F32> { typedef float type; };

/* Values one after the other. */
template <typename T> struct dense {
    enum { CONTIGUOUS = 1 };
    T      *data;
    int64_t numel;
};

/* Anything else.  A view of more dimensions, after those that continue each other
 * are merged, has no kernel: GCK_E_DEVICE, and the caller makes it contiguous. */
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
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j < count) {
            f(j, x.data + i + j);
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

/* ---- dtypes ---- */

/* The halves of a word as float32 and back.  Hardware where it rounds as group.h does
 * (to nearest even, subnormals kept); the NaN bits differ, but NaN is an escape and
 * never comes here.  sm_75 and the emulation run group.h. */
template <gck_dtype DTYPE>
GCK_LANE_FN float half_value(uint32_t word, int upper)
{
    if (DTYPE == GCK_BF16) {
        return gck_float(upper ? word & 0xFFFF0000u : word << 16);
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((uint16_t)(upper ? word >> 16 : word)));
    return f;
#else
    return gck_from_f16((uint16_t)(upper ? word >> 16 : word));
#endif
}

template <gck_dtype DTYPE>
GCK_LANE_FN uint32_t pack_halves(float lower, float upper)
{
    if (DTYPE == GCK_F16) {                        /* as gck_store(): never an escape */
        lower = fminf(fmaxf(lower, -65472.f), 65472.f);
        upper = fminf(fmaxf(upper, -65472.f), 65472.f);
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t word;
    if (DTYPE == GCK_F16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
    }
    return word;
#else
    return DTYPE == GCK_F16 ? gck_to_f16(lower) | (uint32_t)gck_to_f16(upper) << 16
                            : gck_to_bf16(lower) | (uint32_t)gck_to_bf16(upper) << 16;
#endif
}

/* Values i .. i + 15 of x; zeros past its end. */
template <gck_dtype DTYPE, typename VIEW>
GCK_LANE_FN void load_values(const VIEW &x, int64_t i, float (&v)[VALUES])
{
    constexpr int WORDS = DTYPE == GCK_F32 ? VALUES : VALUES / 2;
    uint32_t w[WORDS] = {};

    if (by_vectors(x, i)) {
#pragma unroll
        for (int k = 0; k < WORDS; k += 4) {
            const uint4 q = __ldg((const uint4 *)(x.data + i) + k / 4);
            w[k] = q.x, w[k + 1] = q.y, w[k + 2] = q.z, w[k + 3] = q.w;
        }
    } else {
        for_each_value<VALUES>(x, i, x.numel - i, [&](int j, const typename element<DTYPE>::type *at) {
            if constexpr (DTYPE == GCK_F32) {
                w[j] = gck_bits(*at);
            } else {
                w[j / 2] |= (uint32_t)*at << (16 * (j % 2));
            }
        });
    }
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = DTYPE == GCK_F32 ? gck_float(w[j * WORDS / VALUES]) : half_value<DTYPE>(w[j * WORDS / VALUES], j % 2);
    }
}

/* The inverse, of values that are not escapes. */
template <gck_dtype DTYPE, typename VIEW>
GCK_LANE_FN void store_values(const VIEW &x, int64_t i, const float (&v)[VALUES])
{
    constexpr int WORDS = DTYPE == GCK_F32 ? VALUES : VALUES / 2;
    uint32_t w[WORDS];

#pragma unroll
    for (int k = 0; k < WORDS; k++) {
        w[k] = DTYPE == GCK_F32 ? gck_bits(v[k]) : pack_halves<DTYPE>(v[k * VALUES / WORDS], v[k * VALUES / WORDS + 1]);
    }
    if (by_vectors(x, i)) {
#pragma unroll
        for (int k = 0; k < WORDS; k += 4) {
            ((uint4 *)(x.data + i))[k / 4] = make_uint4(w[k], w[k + 1], w[k + 2], w[k + 3]);
        }
    } else {
        for_each_value<VALUES>(x, i, x.numel - i, [&](int j, typename element<DTYPE>::type *at) {
            if constexpr (DTYPE == GCK_F32) {
                *at = v[j];
            } else {
                *at = (uint16_t)(w[j / 2] >> (16 * (j % 2)));
            }
        });
    }
}

/* ---- lanes ---- */

/* The largest magnitude of 16 values, as bits: NaN and infinity are larger than any. */
GCK_LANE_FN uint32_t lane_amax(const float (&v)[VALUES])
{
    uint32_t amax = 0;

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const uint32_t abs = gck_bits(v[j]) & 0x7FFFFFFFu;
        amax = abs > amax ? abs : amax;
    }
    return amax;
}

/* The largest of the 8 lanes of a group, in each of them. */
GCK_LANE_FN uint32_t group_max(uint32_t amax)
{
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
        const uint32_t other = __shfl_xor_sync(ALL_LANES, amax, lanes);
        amax = other > amax ? other : amax;
    }
    return amax;
}

/* True in the 8 lanes of a group when it is true in one of them. */
GCK_LANE_FN bool group_any(bool here)
{
    const unsigned first = threadIdx.x % 32 / LANES * LANES;

    return (__ballot_sync(ALL_LANES, here) >> first & ((1u << LANES) - 1u)) != 0;
}

/* What a format does with one lane's share of an ordinary group.  Called by all lanes
 * of a warp.  lane_encode: the 16 codes, four to a word, and the scale; false when the
 * group is not ordinary (the same in its 8 lanes).  lane_decode: the 16 values of a scale
 * without escape bit. */
template <gck_format FORMAT>
GCK_LANE_FN bool lane_encode(float (&v)[VALUES], uint32_t limit, uint32_t (&codes)[4], uint32_t *scale);
template <gck_format FORMAT>
GCK_LANE_FN void lane_decode(const uint32_t (&codes)[4], uint32_t scale, float (&v)[VALUES]);

/* A group that is not ordinary: one lane, the reference, memory only.  Such groups are
 * rare (masks merged into biases), so they may be slow but must be right. */
template <gck_format FORMAT, gck_dtype DTYPE, typename T>
GCK_LANE_FN uint16_t slow_encode(const dense<T> &x, int64_t i, int count, uint8_t *codes)
{
    return gck_encode_unrotated(FORMAT, x.data + i, DTYPE, count, FORMAT == GCK_INT8, codes);
}

template <gck_format FORMAT, gck_dtype DTYPE, typename T>
static __device__ __noinline__ uint16_t slow_encode(const strided<T> &x, int64_t i, int count, uint8_t *codes)
{
    T buffer[GCK_GROUP];

    for (int j = 0; j < count; j++) {
        int64_t run;
        buffer[j] = x.data[offset_of(x, i + j, &run)];
    }
    return gck_encode_unrotated(FORMAT, buffer, DTYPE, count, FORMAT == GCK_INT8, codes);
}

template <gck_format FORMAT, gck_dtype DTYPE, typename T>
GCK_LANE_FN void slow_decode(const uint8_t *codes, uint16_t scale, const dense<T> &x, int64_t i, int count)
{
    gck_decode_unrotated(FORMAT, codes, scale, x.data + i, DTYPE, count);
}

template <gck_format FORMAT, gck_dtype DTYPE, typename T>
static __device__ __noinline__ void slow_decode(const uint8_t *codes, uint16_t scale, const strided<T> &x,
                                                int64_t i, int count)
{
    T buffer[GCK_GROUP];

    gck_decode_unrotated(FORMAT, codes, scale, buffer, DTYPE, count);
    for (int j = 0; j < count; j++) {
        int64_t run;
        x.data[offset_of(x, i + j, &run)] = buffer[j];
    }
}

/* ---- kernels ---- */

/* One group per 8 lanes, and no loop: it would cost registers, and a grid of 2^31 - 1
 * blocks holds 2^43 values.  All lanes of a warp meet in the shuffles; those past the
 * last group carry zeros and store nothing. */
GCK_LANE_FN int64_t group_of_lane(void)
{
    return (int64_t)blockIdx.x * GROUPS_PER_BLOCK + (int)threadIdx.x / LANES;
}

GCK_LANE_FN int count_of(int64_t numel, int64_t first)
{
    return numel - first < GCK_GROUP ? (int)(numel - first) : GCK_GROUP;
}

/* The payload is read again in the backward pass only, x perhaps at once: stores of
 * the payload are streaming, loads of x are not. */
template <gck_format FORMAT, gck_dtype DTYPE, typename VIEW>
static __global__ void __launch_bounds__(THREADS, blocks_per_sm(DTYPE, VIEW::CONTIGUOUS))
encode_kernel(const __grid_constant__ VIEW x, int64_t ngroups, uint8_t *codes, uint16_t *scales)
{
    const int64_t g = group_of_lane(), first = g * GCK_GROUP;
    const int lane = (int)threadIdx.x % LANES;
    float v[VALUES];
    uint32_t word[4], scale;

    load_values<DTYPE>(x, first + lane * VALUES, v);
    const bool ordinary = lane_encode<FORMAT>(v, gck_limit(DTYPE), word, &scale);
    if (g < ngroups && ordinary) {
        __stcs((uint4 *)(codes + first) + lane, make_uint4(word[0], word[1], word[2], word[3]));
        if (lane == 0) {
            scales[g] = (uint16_t)scale;
        }
    } else if (g < ngroups && lane == 0) {
        scales[g] = slow_encode<FORMAT, DTYPE>(x, first, count_of(x.numel, first), codes + first);
    }
}

template <gck_format FORMAT, gck_dtype DTYPE, typename VIEW>
static __global__ void __launch_bounds__(THREADS, blocks_per_sm(DTYPE, VIEW::CONTIGUOUS))
decode_kernel(const uint8_t *codes, const uint16_t *scales, int64_t ngroups, const __grid_constant__ VIEW x)
{
    const int64_t g = group_of_lane(), first = g * GCK_GROUP;
    const int lane = (int)threadIdx.x % LANES;
    const uint4 q = g < ngroups ? __ldcs((const uint4 *)(codes + first) + lane) : make_uint4(0, 0, 0, 0);
    const uint16_t scale = g < ngroups ? __ldg(scales + g) : (uint16_t)0;
    const bool ordinary = (scale & GCK_ESC) == 0;
    const uint32_t word[4] = {q.x, q.y, q.z, q.w};
    float v[VALUES];

    lane_decode<FORMAT>(word, ordinary ? scale : 0u, v);
    if (g < ngroups && ordinary) {
        store_values<DTYPE>(x, first + lane * VALUES, v);
    } else if (g < ngroups && lane == 0) {
        slow_decode<FORMAT, DTYPE>(codes + first, scale, x, first, count_of(x.numel, first));
    }
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

/* Call launch() with `device` current; launch errors only: never synchronise. */
template <typename F>
static int launch_on(int device, F launch)
{
    int before, status = (int)cudaGetDevice(&before);

    if (status == 0 && before != device) {
        status = (int)cudaSetDevice(device);
    }
    if (status != 0) {
        return status;
    }
    status = launch();
    if (status == GCK_OK) {
        status = (int)cudaGetLastError();
    }
    if (before != device) {
        const int back = (int)cudaSetDevice(before);
        status = status == GCK_OK ? back : status;
    }
    return status;
}

template <gck_format FORMAT, gck_dtype DTYPE, typename VIEW>
static int launch_groups(bool encode, const VIEW &x, uint8_t *codes, cudaStream_t stream)
{
    const int64_t ngroups = groups_of(x.numel);
    const unsigned grid = grid_for(ngroups, GROUPS_PER_BLOCK);
    uint16_t *scales = (uint16_t *)(codes + ngroups * GCK_GROUP);

    if (encode) {
        GCK_LAUNCH((encode_kernel<FORMAT, DTYPE, VIEW>), grid, THREADS, stream, x, ngroups, codes, scales);
    } else {
        GCK_LAUNCH((decode_kernel<FORMAT, DTYPE, VIEW>), grid, THREADS, stream, codes, scales, ngroups, x);
    }
    return GCK_OK;
}

template <gck_format FORMAT, gck_dtype DTYPE>
static int run_as(bool encode, const gck_tensor *t, uint8_t *codes)
{
    typedef typename element<DTYPE>::type T;
    const dense<T> flat = {(T *)t->data, t->numel};
    strided<T> view;

    switch (strided_view(t, &view)) {
    case 0:  return launch_groups<FORMAT, DTYPE>(encode, flat, codes, (cudaStream_t)t->stream);
    case 1:  return launch_groups<FORMAT, DTYPE>(encode, view, codes, (cudaStream_t)t->stream);
    default: return GCK_E_DEVICE;
    }
}

template <gck_format FORMAT>
static int run_group(bool encode, const gck_tensor *t, uint8_t *codes)
{
    if (t->numel == 0) {
        return GCK_OK;                             /* an empty grid is a launch error */
    }
    return launch_on(t->device, [=]() {
        switch (t->dtype) {
        case GCK_F32:  return run_as<FORMAT, GCK_F32>(encode, t, codes);
        case GCK_F16:  return run_as<FORMAT, GCK_F16>(encode, t, codes);
        case GCK_BF16: return run_as<FORMAT, GCK_BF16>(encode, t, codes);
        default:       return (int)GCK_E_DTYPE;
        }
    });
}

/* Write the payloads of n tensors, or the values of the payloads.  What is read is not written. */
template <gck_format FORMAT>
static int run_groups(bool encode, const gck_tensor *t, const void *const *payloads, int n)
{
    for (int i = 0; i < n; i++) {
        const int status = run_group<FORMAT>(encode, t + i, (uint8_t *)payloads[i]);
        if (status != GCK_OK) {
            return status;
        }
    }
    return GCK_OK;
}

#endif
