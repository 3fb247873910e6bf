/* kernels_avx2.c: the table of the AVX2 kernels. */
#if defined(__x86_64__)

#include "codec/x86/avx2.h"

#define ROW(what, format)                                                                           \
    [format] = {gck_avx2_##what##_##format##_GCK_F32, gck_avx2_##what##_##format##_GCK_F16,         \
                gck_avx2_##what##_##format##_GCK_BF16}

#define ROWS(what)                                                                                  \
    {                                                                                               \
        ROW(what, GCK_E4M3), ROW(what, GCK_E5M2), ROW(what, GCK_INT8), ROW(what, GCK_INT8_PLAIN),   \
        ROW(what, GCK_INT6), ROW(what, GCK_INT4)                                                    \
    }

const gck_isa gck_isa_avx2 = {
    .name = "avx2",
    .encode = ROWS(encode),
    .encode_noisy = ROWS(encode_noisy),
    .decode = ROWS(decode),
};

#else
typedef int gck_isa_avx2_is_empty;       /* ISO C requires a declaration in every file */
#endif
