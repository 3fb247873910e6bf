/* float_bits.h: float32, float16 and bfloat16 as bits, one value at a time.
 *
 * Shared by the host reference and the device kernels: C to one, C++ to the other. */
#ifndef GRADCKPT_FLOAT_BITS_H
#define GRADCKPT_FLOAT_BITS_H

#include <math.h>
#include <string.h>

#include "gradckpt.h"

#ifdef __CUDACC__
#define GCK_FN static __device__ __forceinline__
#define GCK_SLOW_FN static __device__ __noinline__
#define GCK_HOT_FN static __device__ __forceinline__
#define GCK_TABLE static __constant__ const
#define GCK_LAYOUT_FN static __host__ __device__ __forceinline__   /* the launchers need these too */
#else
#define GCK_FN static inline
#define GCK_SLOW_FN static inline
#define GCK_HOT_FN static inline __attribute__((always_inline))    /* its format and dtype are constants */
#define GCK_TABLE static const __attribute__((unused))
#define GCK_LAYOUT_FN static inline __attribute__((always_inline))
#endif
#ifdef __cplusplus
#define GCK_CONSTEXPR constexpr
#else
#define GCK_CONSTEXPR
#endif

/* Groups that so many values fill, the last one perhaps in part. */
GCK_LAYOUT_FN int64_t gck_groups_of(int64_t numel) { return numel / GCK_GROUP + (numel % GCK_GROUP != 0); }

/* ---- bits ---- */

GCK_FN uint32_t gck_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

GCK_FN float gck_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

GCK_FN float gck_abs(float f) { return gck_float(gck_bits(f) & 0x7FFFFFFFu); }

/* Integers that order like numbers, -0 below +0; and back. */
GCK_FN int32_t gck_key(float f)
{
    const int32_t bits = (int32_t)gck_bits(f);

    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

GCK_FN float gck_of_key(int32_t key) { return gck_float((uint32_t)(key ^ (key >> 31 & 0x7FFFFFFF))); }

/* The place of the lowest bit that is set; u is not 0. */
GCK_FN int gck_lowest_bit(uint64_t u)
{
#ifdef __CUDA_ARCH__
    return __ffsll((long long)u) - 1;
#else
    return __builtin_ctzll(u);
#endif
}
/* ---- dtypes ---- */

GCK_FN float gck_from_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t rest = h & 0x7FFFu;

    if (rest >= 0x7C00u) {                         /* Inf, NaN */
        return gck_float(sign | 0x7F800000u | ((rest & 0x3FFu) << 13));
    }
    /* Multiplying by a power of two normalises a subnormal: exact. */
    return gck_float(sign | gck_bits(gck_float(rest << 13) * 0x1p112f));
}

/* v is finite or NaN, |v| <= 65504: the decoders clamp. */
GCK_FN uint16_t gck_to_f16(float v)
{
    const uint32_t u = gck_bits(v);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t abs = u & 0x7FFFFFFFu;

    if (abs >= 0x7F800000u) {
        return (uint16_t)(sign | (abs > 0x7F800000u ? 0x7E00u : 0x7C00u));
    }
    if (abs < 0x38800000u) {                       /* below 2^-14: to multiples of 2^-24 */
        return (uint16_t)(sign | (gck_bits(gck_float(abs) + 0.5f) - 0x3F000000u));
    }
    return (uint16_t)(sign | ((abs + 0xFFFu + ((abs >> 13) & 1u) - 0x38000000u) >> 13));
}

GCK_FN uint16_t gck_to_bf16(float v)
{
    const uint32_t u = gck_bits(v);

    if ((u & 0x7FFFFFFFu) > 0x7F800000u) {
        return 0x7FC0u;
    }
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

/* Value i of x as float32: exact. */
GCK_FN float gck_load(const void *x, gck_dtype dtype, int64_t i)
{
    switch (dtype) {
    case GCK_F16:  return gck_from_f16(((const uint16_t *)x)[i]);
    case GCK_BF16: return gck_float((uint32_t)((const uint16_t *)x)[i] << 16);
    default:       return ((const float *)x)[i];
    }
}

/* Largest finite value that is not an escape: as float32 bits, comparable as integers. */
GCK_FN uint32_t gck_limit(gck_dtype dtype)
{
    return dtype == GCK_F16 ? 0x477FC000u     /* 65472 */
         : dtype == GCK_BF16 ? 0x71490000u    /* the last bfloat16 below 1e30 */
                             : 0x7149F2CAu;   /* 1e30f */
}

GCK_FN float gck_max_value(gck_dtype dtype)
{
    return gck_float(dtype == GCK_F16 ? 0x477FE000u : dtype == GCK_BF16 ? 0x7F7F0000u : 0x7F7FFFFFu);
}

/* v in the dtype, rounded once.  An escape is stored unchanged, which is exact in its dtype. */
GCK_FN void gck_store_escape(void *x, gck_dtype dtype, int64_t i, float v)
{
    if (dtype == GCK_F16) {
        ((uint16_t *)x)[i] = gck_to_f16(v);
    } else if (dtype == GCK_BF16) {
        ((uint16_t *)x)[i] = gck_to_bf16(v);
    } else {
        ((float *)x)[i] = v;
    }
}

/* An ordinary value: a float16 never overflows into an escape. */
GCK_FN void gck_store(void *x, gck_dtype dtype, int64_t i, float v)
{
    gck_store_escape(x, dtype, i, dtype != GCK_F16 ? v : v > 65472.f ? 65472.f : v < -65472.f ? -65472.f : v);
}

#endif
