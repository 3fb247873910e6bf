/* scalar.c: the host kernels in portable C: group.h in a loop.  Every other
 * instruction set is compared with this one, byte by byte. */
#include "cpu.h"

/* One pair of functions per format and dtype, so that the compiler sees both as
 * constants and folds the switches of group.h away. */
#define SCALAR(format, dtype)                                                                       \
    static void encode_##format##_##dtype(const void *x, int64_t ngroups, uint8_t *codes,           \
                                          uint16_t *scales, int streaming)                          \
    {                                                                                               \
        const size_t stride = (dtype == GCK_F32 ? 4 : 2) * (size_t)GCK_GROUP;                       \
        (void)streaming;                                                                            \
        for (int64_t g = 0; g < ngroups; g++) {                                                     \
            scales[g] = gck_encode_group(format, (const char *)x + (size_t)g * stride, dtype,       \
                                         GCK_GROUP, codes + g * GCK_GROUP);                         \
        }                                                                                           \
    }                                                                                               \
    static void decode_##format##_##dtype(const uint8_t *codes, const uint16_t *scales,             \
                                          int64_t ngroups, void *x, int streaming)                  \
    {                                                                                               \
        const size_t stride = (dtype == GCK_F32 ? 4 : 2) * (size_t)GCK_GROUP;                       \
        (void)streaming;                                                                            \
        for (int64_t g = 0; g < ngroups; g++) {                                                     \
            gck_decode_group(format, codes + g * GCK_GROUP, scales[g],                              \
                             (char *)x + (size_t)g * stride, dtype, GCK_GROUP);                     \
        }                                                                                           \
    }
#define SCALAR_OF(format) SCALAR(format, GCK_F32) SCALAR(format, GCK_F16) SCALAR(format, GCK_BF16)
SCALAR_OF(GCK_E4M3)
SCALAR_OF(GCK_E5M2)
SCALAR_OF(GCK_INT8)
SCALAR_OF(GCK_INT8_PLAIN)

#define ROW(what, format) \
    [format] = {what##_##format##_GCK_F32, what##_##format##_GCK_F16, what##_##format##_GCK_BF16}

const gck_isa gck_isa_scalar = {
    .name = "scalar",
    .encode = {ROW(encode, GCK_E4M3), ROW(encode, GCK_E5M2), ROW(encode, GCK_INT8), ROW(encode, GCK_INT8_PLAIN)},
    .decode = {ROW(decode, GCK_E4M3), ROW(decode, GCK_E5M2), ROW(decode, GCK_INT8), ROW(decode, GCK_INT8_PLAIN)},
};
