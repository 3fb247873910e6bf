/* cast.cu: device kernels of bf16 and fp16: cast.h is the format. */
#include "codec/format/cast.h"
#include "codec/cuda/overflow.cuh"

constexpr int CAST_PER_SM = 4;                   /* blocks of 256 x 64 bytes: 64 KiB in flight */

/* Two values below the end, as bits. */
template <gck_dtype DTYPE>
GCK_LANE_FN uint32_t narrowed_pair(uint32_t lower, uint32_t upper)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return DTYPE == GCK_F16 ? ptx_f16x2(gck_float(lower), gck_float(upper))
                            : ptx_bf16x2(gck_float(lower), gck_float(upper));
#else
    return gck_narrowed(lower, DTYPE) | (uint32_t)gck_narrowed(upper, DTYPE) << 16;
#endif
}

template <gck_dtype DTYPE, typename VIEW>
static __global__ void __launch_bounds__(THREADS, CAST_PER_SM)
narrow_kernel(const __grid_constant__ VIEW x, const __grid_constant__ dense<uint16_t> out,
              const __grid_constant__ listener to)
{
    const int64_t i = first_of_lane();
    uint32_t v[VALUES], w[VALUES / 2], most = 0;
    bool overflows = false;

    load_words(x, i, v);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const uint32_t abs = v[j] & 0x7FFFFFFFu;
        most = abs > most ? abs : most;
    }
    if (most < gck_cast_end(DTYPE)) {
#pragma unroll
        for (int k = 0; k < VALUES / 2; k++) {
            w[k] = narrowed_pair<DTYPE>(v[2 * k], v[2 * k + 1]);
        }
    } else {                                       /* NaN, infinite, or too large */
#pragma unroll
        for (int k = 0; k < VALUES / 2; k++) {
            overflows |= gck_overflows(v[2 * k], DTYPE) || gck_overflows(v[2 * k + 1], DTYPE);
            w[k] = gck_narrowed(v[2 * k], DTYPE) | (uint32_t)gck_narrowed(v[2 * k + 1], DTYPE) << 16;
        }
    }
    if (i + VALUES <= out.numel) {
        __stcs((uint4 *)(out.data + i), make_uint4(w[0], w[1], w[2], w[3]));
        __stcs((uint4 *)(out.data + i) + 1, make_uint4(w[4], w[5], w[6], w[7]));
    } else {
        store_words(out, i, w);
    }
    if (to.word != NULL) {
        const bool any = __syncthreads_or(overflows) != 0;
        if (threadIdx.x == 0) {
            report(to, any);
        }
    }
}

template <gck_dtype DTYPE, typename VIEW>
static __global__ void __launch_bounds__(THREADS, CAST_PER_SM)
widen_kernel(const __grid_constant__ dense<uint16_t> in, const __grid_constant__ VIEW x)
{
    const int64_t i = first_of_lane();
    uint32_t w[VALUES / 2], v[VALUES];

    load_words(in, i, w);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = gck_widened((uint16_t)(w[j / 2] >> (16 * (j % 2))), DTYPE);
    }
    store_words(x, i, v);
}

template <gck_dtype DTYPE, typename VIEW>
static void launch_narrow(const VIEW &x, void *payload, const listener &to, cudaStream_t stream)
{
    const dense<uint16_t> out = {(uint16_t *)payload, x.numel};

    GCK_LAUNCH((narrow_kernel<DTYPE, VIEW>), grid_of(x.numel), THREADS, stream, x, out, to);
}

/* The payload is only read. */
template <gck_dtype DTYPE, typename VIEW>
static void launch_widen(const void *payload, const VIEW &x, cudaStream_t stream)
{
    const dense<uint16_t> in = {(uint16_t *)payload, x.numel};

    GCK_LAUNCH((widen_kernel<DTYPE, VIEW>), grid_of(x.numel), THREADS, stream, in, x);
}

template <gck_dtype DTYPE>
static int narrow(const gck_tensor *x, const gck_bytes *payloads, const gck_how *how, int n)
{
    return for_each_tensor(x, n, [=](const gck_tensor *t, int i) {
        const cudaStream_t stream = (cudaStream_t)t->stream;
        listener to;
        const int status = t->dtype != GCK_F32 ? (int)GCK_E_DTYPE : listen(how, i, &to);

        return status != GCK_OK ? status : with_view<uint32_t>(t, [=](const auto &view) {
            launch_narrow<DTYPE>(view, payloads[i].codes, to, stream);
        });
    });
}

template <gck_dtype DTYPE>
static int widen(const gck_bytes *payloads, const gck_tensor *out, int n)
{
    return for_each_tensor(out, n, [=](const gck_tensor *t, int i) {
        return t->dtype != GCK_F32 ? (int)GCK_E_DTYPE : with_view<uint32_t>(t, [=](const auto &view) {
            launch_widen<DTYPE>(payloads[i].codes, view, (cudaStream_t)t->stream);
        });
    });
}

extern "C" {

int gck_bf16_encode_cuda(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n)
{
    return narrow<GCK_BF16>(x, to, how, n);
}

int gck_bf16_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n)
{
    return widen<GCK_BF16>(from, out, n);
}

int gck_fp16_encode_cuda(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n)
{
    return narrow<GCK_F16>(x, to, how, n);
}

int gck_fp16_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n)
{
    return widen<GCK_F16>(from, out, n);
}

}
