/* cast.h: float32 rounded to a 16-bit dtype, value by value: the format of `bf16` and `fp16`.
 * Payload: uint16_t value[n], in contiguous order.
 *
 * Rounding is to nearest even and keeps subnormals and infinities.  NaN keeps its sign and the
 * first bits of its fraction, and becomes quiet.  A finite value that would become infinite is
 * stored as the NaN below, and the tensor overflows. */
#ifndef GRADCKPT_CAST_H
#define GRADCKPT_CAST_H

#include "codec/format/float_bits.h"

/* |x| as bits: from here on a finite x would round to infinity. */
#define GCK_BF16_END 0x7F7F8000u
#define GCK_F16_END  0x477FF000u        /* 65520 */

GCK_FN uint32_t gck_cast_end(gck_dtype dtype) { return dtype == GCK_F16 ? GCK_F16_END : GCK_BF16_END; }

GCK_FN int gck_overflows(uint32_t bits, gck_dtype dtype)
{
    const uint32_t abs = bits & 0x7FFFFFFFu;

    return abs >= gck_cast_end(dtype) && abs < 0x7F800000u;
}

/* Any float32, as bits. */
GCK_FN uint16_t gck_narrowed(uint32_t bits, gck_dtype dtype)
{
    const uint32_t sign = bits >> 16 & 0x8000u, abs = bits & 0x7FFFFFFFu;
    const uint32_t nan = dtype == GCK_F16 ? 0x7E00u : 0x7FC0u;

    if (abs > 0x7F800000u) {
        return (uint16_t)(sign | nan | (dtype == GCK_F16 ? abs >> 13 & 0x3FFu : abs >> 16));
    }
    if (gck_overflows(bits, dtype)) {
        return (uint16_t)(sign | nan);
    }
    return dtype == GCK_F16 ? gck_to_f16(gck_float(bits)) : gck_to_bf16(gck_float(bits));
}

/* The float32 of a 16-bit value, as bits.  It is exact; NaN stays NaN, but quiet. */
GCK_FN uint32_t gck_widened(uint16_t value, gck_dtype dtype)
{
    const uint32_t bits = dtype == GCK_F16 ? gck_bits(gck_from_f16(value)) : (uint32_t)value << 16;

    return bits | ((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x400000u : 0u);
}

#endif
