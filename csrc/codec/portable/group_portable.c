/* group_portable.c: the kernels of the group codecs in portable C: group.h in a loop.  Every other
 * instruction set is compared with this one, byte by byte. */
#include "codec/format/group.h"
#include "codec/portable/kernels_portable.h"

/* One set of functions per format and dtype, so that both are constants to the compiler, which
 * folds the switches of group.h away. */
#define KERNELS(format, dtype)                                                                                \
    void gck_portable_encode_##format##_##dtype(const void *x, int64_t ngroups, uint8_t *codes,               \
                                          uint16_t *side, int64_t first, int streaming)                       \
    {                                                                                                         \
        (void)streaming;                                                                                      \
        for (int64_t g = 0; g < ngroups; g++) {                                                               \
            gck_encode_group(format, (const char *)x + g * GCK_GROUP * gck_itemsize(dtype), dtype,            \
                             GCK_GROUP, first + g, NULL, codes + g * gck_code_bytes(format),                  \
                             side + g * gck_side_words(format));                                              \
        }                                                                                                     \
    }                                                                                                         \
    void gck_portable_encode_noisy_##format##_##dtype(const void *x, int64_t ngroups, uint8_t *codes,         \
                                                uint16_t *side, const gck_dither *dither,                     \
                                                int64_t first)                                                \
    {                                                                                                         \
        uint16_t noise[GCK_GROUP];                                                                            \
        for (int64_t g = 0; g < ngroups; g++) {                                                               \
            gck_noise_of_group(dither, first + g, noise);                                                     \
            gck_encode_group(format, (const char *)x + g * GCK_GROUP * gck_itemsize(dtype), dtype,            \
                             GCK_GROUP, first + g, noise, codes + g * gck_code_bytes(format),                 \
                             side + g * gck_side_words(format));                                              \
        }                                                                                                     \
    }                                                                                                         \
    void gck_portable_decode_##format##_##dtype(const uint8_t *codes, const uint16_t *side,                   \
                                          int64_t ngroups, void *x, int64_t first, int streaming)             \
    {                                                                                                         \
        (void)streaming;                                                                                      \
        for (int64_t g = 0; g < ngroups; g++) {                                                               \
            gck_decode_group(format, codes + g * gck_code_bytes(format),                                      \
                             side + g * gck_side_words(format), first + g,                                    \
                             (char *)x + g * GCK_GROUP * gck_itemsize(dtype), dtype, GCK_GROUP);              \
        }                                                                                                     \
    }
#define EACH_DTYPE(_, name, id, format, ...) KERNELS(format, GCK_F32) KERNELS(format, GCK_F16) KERNELS(format, GCK_BF16)
GCK_GROUP_CODECS(EACH_DTYPE, _)
