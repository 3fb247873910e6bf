/* cast_kernels.h: the kernels of bf16 and fp16 for vectors; a template.
 *
 * The includer has defined narrow(), widen(), can_stream() and ISA, its instruction set's name. */
#include "codec/portable/kernels_portable.h"

#define KERNEL_OF(isa, function) gck_##isa##_##function
#define KERNEL(isa, function) KERNEL_OF(isa, function)

/* Two copies of a loop, so that it does not test at every store. */
#define KERNELS(name, dtype)                                                                    \
    int KERNEL(ISA, to_##name)(const float *x, int64_t n, uint16_t *to, int streaming)          \
    {                                                                                           \
        int status;                                                                             \
        if (can_stream(to, streaming)) {                                                        \
            status = narrow(dtype, gck_portable_to_##name, x, n, to, 1);                        \
            _mm_sfence();                                                                       \
        } else {                                                                                \
            status = narrow(dtype, gck_portable_to_##name, x, n, to, 0);                        \
        }                                                                                       \
        return status;                                                                          \
    }                                                                                           \
    void KERNEL(ISA, from_##name)(const uint16_t *from, int64_t n, float *x, int streaming)     \
    {                                                                                           \
        if (can_stream(x, streaming)) {                                                         \
            widen(dtype, gck_portable_from_##name, from, n, x, 1);                              \
            _mm_sfence();                                                                       \
        } else {                                                                                \
            widen(dtype, gck_portable_from_##name, from, n, x, 0);                              \
        }                                                                                       \
    }
KERNELS(bf16, GCK_BF16)
KERNELS(f16, GCK_F16)
