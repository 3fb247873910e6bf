/* kernels_avx512.c: the table of the AVX-512 kernels. */
#if defined(__x86_64__)
#include "codec/x86/avx512.h"

#define ROW(what, format)                                                                           \
    [format] = {gck_avx512_##what##_##format##_GCK_F32, gck_avx512_##what##_##format##_GCK_F16,     \
                gck_avx512_##what##_##format##_GCK_BF16}

#define ROWS(what)                                                                                  \
    {                                                                                               \
        ROW(what, GCK_E4M3), ROW(what, GCK_E5M2), ROW(what, GCK_INT8), ROW(what, GCK_INT8_PLAIN),   \
        ROW(what, GCK_INT6), ROW(what, GCK_INT4)                                                    \
    }

const gck_isa gck_isa_avx512 = {
    .name = "avx512",
    .encode = ROWS(encode),
    .encode_noisy = ROWS(encode_noisy),
    .decode = ROWS(decode),
};
#undef ROWS
#undef ROW

#else
typedef int gck_isa_avx512_is_empty;       /* ISO C requires a declaration in every file */
#endif
