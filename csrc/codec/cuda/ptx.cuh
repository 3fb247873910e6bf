/* ptx.cuh: instructions that CUDA C++ has no name for.
 *
 * The emulation has models of them, so that code for newer architectures runs there
 * too.  Callers choose by __CUDA_ARCH__ and keep a portable branch. */
#ifndef GRADCKPT_PTX_CUH
#define GRADCKPT_PTX_CUH

#ifndef GCK_EMULATE_CUDA

#include <stdint.h>

#define GCK_PTX_FN static __device__ __forceinline__

/* Bytes 0xFF where bit 7 of a byte is set, else 0: prmt's sign mode, which
 * __byte_perm() does not promise. */
GCK_PTX_FN uint32_t ptx_byte_signs(uint32_t w)
{
    uint32_t r;
    asm("prmt.b32 %0, %1, 0, 0xBA98;" : "=r"(r) : "r"(w));
    return r;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

/* The larger of |a| and |b|; NaN when one is NaN. */
GCK_PTX_FN float ptx_max_abs(float a, float b)
{
    float r;
    asm("{ .reg .f32 p, q; abs.f32 p, %1; abs.f32 q, %2; max.NaN.f32 %0, p, q; }" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

/* Of two values each: the larger, the smaller; of a NaN and a number the number. */
#define GCK_PTX_PAIRS(name, instruction)                                      \
    GCK_PTX_FN uint32_t name(uint32_t a, uint32_t b)                          \
    {                                                                         \
        uint32_t r;                                                           \
        asm(instruction " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));           \
        return r;                                                             \
    }
GCK_PTX_PAIRS(ptx_max_f16x2, "max.f16x2")
GCK_PTX_PAIRS(ptx_min_f16x2, "min.f16x2")
GCK_PTX_PAIRS(ptx_max_bf16x2, "max.bf16x2")
GCK_PTX_PAIRS(ptx_min_bf16x2, "min.bf16x2")

/* Exact. */
GCK_PTX_FN float ptx_f32_f16(uint16_t h)
{
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h));
    return r;
}

/* Two values to nearest even; the NaN bits differ from group.h's. */
GCK_PTX_FN uint32_t ptx_f16x2(float lower, float upper)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower));
    return r;
}

GCK_PTX_FN uint32_t ptx_bf16x2(float lower, float upper)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower));
    return r;
}

#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

/* Two values to OCP FP8, to nearest even, subnormals kept; beyond the largest: the largest. */
GCK_PTX_FN uint32_t ptx_e4m3x2(float lower, float upper)
{
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(upper), "f"(lower));
    return r;
}

GCK_PTX_FN uint32_t ptx_e5m2x2(float lower, float upper)
{
    uint16_t r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(upper), "f"(lower));
    return r;
}

/* The two FP8 values of the lower half of a word as float16: exact. */
GCK_PTX_FN uint32_t ptx_f16x2_e4m3x2(uint32_t two)
{
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((uint16_t)two));
    return r;
}

GCK_PTX_FN uint32_t ptx_f16x2_e5m2x2(uint32_t two)
{
    uint32_t r;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(r) : "h"((uint16_t)two));
    return r;
}

#endif
#endif
#endif
