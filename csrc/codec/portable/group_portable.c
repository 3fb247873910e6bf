/* group_portable.c: the host kernels in portable C: group.h in a loop.  Every other instruction set is
 * compared with this one, byte by byte. */
#include "codec/host/cpu_features.h"

/* One set of functions per format and dtype, so that both are constants to the compiler, which
 * folds the switches of group.h away. */
#define SCALAR(format, dtype)                                                                       \
    static void encode_##format##_##dtype(const void *x, int64_t ngroups, uint8_t *codes,           \
                                          uint16_t *side, int64_t first, int streaming)             \
    {                                                                                               \
        (void)streaming;                                                                            \
        for (int64_t g = 0; g < ngroups; g++) {                                                     \
            gck_encode_group(format, (const char *)x + g * GCK_GROUP * GCK_FLOAT_BYTES(dtype), dtype, \
                             GCK_GROUP, first + g, NULL, codes + g * GCK_CODE_BYTES(format),                   \
                             side + g * GCK_SIDE_WORDS(format));                                    \
        }                                                                                           \
    }                                                                                               \
    static void encode_noisy_##format##_##dtype(const void *x, int64_t ngroups, uint8_t *codes,     \
                                                uint16_t *side, const gck_dither *dither,           \
                                                int64_t first)                                      \
    {                                                                                               \
        uint16_t noise[GCK_GROUP];                                                                  \
        for (int64_t g = 0; g < ngroups; g++) {                                                     \
            gck_noise_of_group(dither, first + g, noise);                                           \
            gck_encode_group(format, (const char *)x + g * GCK_GROUP * GCK_FLOAT_BYTES(dtype), dtype, \
                             GCK_GROUP, first + g, noise, codes + g * GCK_CODE_BYTES(format),                  \
                             side + g * GCK_SIDE_WORDS(format));                                    \
        }                                                                                           \
    }                                                                                               \
    static void decode_##format##_##dtype(const uint8_t *codes, const uint16_t *side,               \
                                          int64_t ngroups, void *x, int64_t first, int streaming)   \
    {                                                                                               \
        (void)streaming;                                                                            \
        for (int64_t g = 0; g < ngroups; g++) {                                                     \
            gck_decode_group(format, codes + g * GCK_CODE_BYTES(format),                            \
                             side + g * GCK_SIDE_WORDS(format), first + g,                          \
                             (char *)x + g * GCK_GROUP * GCK_FLOAT_BYTES(dtype), dtype, GCK_GROUP); \
        }                                                                                           \
    }
#define SCALAR_OF(format) SCALAR(format, GCK_F32) SCALAR(format, GCK_F16) SCALAR(format, GCK_BF16)
SCALAR_OF(GCK_E4M3)
SCALAR_OF(GCK_E5M2)
SCALAR_OF(GCK_INT8)
SCALAR_OF(GCK_INT8_PLAIN)
SCALAR_OF(GCK_INT6)
SCALAR_OF(GCK_INT4)

#define ROW(what, format) \
    [format] = {what##_##format##_GCK_F32, what##_##format##_GCK_F16, what##_##format##_GCK_BF16}
#define ROWS(what)                                                                                  \
    {                                                                                               \
        ROW(what, GCK_E4M3), ROW(what, GCK_E5M2), ROW(what, GCK_INT8), ROW(what, GCK_INT8_PLAIN),   \
        ROW(what, GCK_INT6), ROW(what, GCK_INT4)                                                    \
    }

const gck_isa gck_isa_scalar = {
    .name = "scalar",
    .encode = ROWS(encode),
    .encode_noisy = ROWS(encode_noisy),
    .decode = ROWS(decode),
};
