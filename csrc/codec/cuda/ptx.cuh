/* ptx.cuh: instructions that CUDA C++ has no name for.
 *
 * The emulation has models of them, so that code for newer architectures runs there
 * too.  Callers choose by __CUDA_ARCH__ and keep a portable branch. */
#ifndef GRADCKPT_PTX_CUH
#define GRADCKPT_PTX_CUH

#ifndef GCK_EMULATE_CUDA

#include <stdint.h>

/* A function of one instruction; the rest: how its result and its operands are constrained. */
#define GCK_PTX(type, name, parameters, instruction, result, ...)    \
    static __device__ __forceinline__ type name parameters           \
    {                                                                \
        type r;                                                      \
        asm(instruction : result(r) : __VA_ARGS__);                  \
        return r;                                                    \
    }
#define GCK_PTX_PAIRS(name, instruction) \
    GCK_PTX(uint32_t, name, (uint32_t a, uint32_t b), instruction " %0, %1, %2;", "=r", "r"(a), "r"(b))
#define GCK_PTX_OF_FLOATS(type, name, instruction, result) \
    GCK_PTX(type, name, (float lower, float upper), instruction " %0, %1, %2;", result, "f"(upper), "f"(lower))
#define GCK_PTX_OF_BYTES(name, instruction) \
    GCK_PTX(uint32_t, name, (uint32_t two), instruction " %0, %1;", "=r", "h"((uint16_t)two))

/* Bytes 0xFF where bit 7 of a byte is set, else 0: prmt's sign mode, which
 * __byte_perm() does not promise. */
GCK_PTX(uint32_t, ptx_byte_signs, (uint32_t w), "prmt.b32 %0, %1, 0, 0xBA98;", "=r", "r"(w))

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

/* The larger of |a| and |b|; NaN when one is NaN. */
GCK_PTX(float, ptx_max_abs, (float a, float b),
        "{ .reg .f32 p, q; abs.f32 p, %1; abs.f32 q, %2; max.NaN.f32 %0, p, q; }", "=f", "f"(a), "f"(b))

/* Of two values each: the larger, the smaller; of a NaN and a number the number. */
GCK_PTX_PAIRS(ptx_max_f16x2, "max.f16x2")
GCK_PTX_PAIRS(ptx_min_f16x2, "min.f16x2")
GCK_PTX_PAIRS(ptx_max_bf16x2, "max.bf16x2")
GCK_PTX_PAIRS(ptx_min_bf16x2, "min.bf16x2")

/* Exact. */
GCK_PTX(float, ptx_f32_f16, (uint16_t h), "cvt.f32.f16 %0, %1;", "=f", "h"(h))

/* Two values to nearest even; the NaN bits differ from group.h's. */
GCK_PTX_OF_FLOATS(uint32_t, ptx_f16x2, "cvt.rn.f16x2.f32", "=r")
GCK_PTX_OF_FLOATS(uint32_t, ptx_bf16x2, "cvt.rn.bf16x2.f32", "=r")

#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

/* Two values to OCP FP8, to nearest even, subnormals kept; beyond the largest: the largest. */
GCK_PTX_OF_FLOATS(uint16_t, ptx_e4m3x2, "cvt.rn.satfinite.e4m3x2.f32", "=h")
GCK_PTX_OF_FLOATS(uint16_t, ptx_e5m2x2, "cvt.rn.satfinite.e5m2x2.f32", "=h")

/* The two FP8 values of the lower half of a word as float16: exact. */
GCK_PTX_OF_BYTES(ptx_f16x2_e4m3x2, "cvt.rn.f16x2.e4m3x2")
GCK_PTX_OF_BYTES(ptx_f16x2_e5m2x2, "cvt.rn.f16x2.e5m2x2")

#endif
#endif
#endif
