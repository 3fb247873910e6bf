/* cast_portable.c: the kernels of bf16 and fp16 in portable C. */
#include "codec/format/cast.h"
#include "codec/portable/kernels_portable.h"

static int narrow(gck_dtype dtype, const float *x, int64_t n, uint16_t *to)
{
    int overflow = 0;

    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = gck_bits(x[i]);
        overflow |= gck_overflows(bits, dtype);
        to[i] = gck_narrowed(bits, dtype);
    }
    return overflow ? GCK_E_OVERFLOW : GCK_OK;
}

static void widen(gck_dtype dtype, const uint16_t *from, int64_t n, float *x)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = gck_float(gck_widened(from[i], dtype));
    }
}

#define KERNELS(name, dtype)                                                                  \
    int gck_portable_to_##name(const float *x, int64_t n, uint16_t *to, int streaming)        \
    {                                                                                         \
        (void)streaming;                                                                      \
        return narrow(dtype, x, n, to);                                                       \
    }                                                                                         \
    void gck_portable_from_##name(const uint16_t *from, int64_t n, float *x, int streaming)   \
    {                                                                                         \
        (void)streaming;                                                                      \
        widen(dtype, from, n, x);                                                             \
    }
KERNELS(bf16, GCK_BF16)
KERNELS(f16, GCK_F16)
