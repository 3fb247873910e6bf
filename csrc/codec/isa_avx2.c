/* isa_avx2.c: the table of the AVX2 kernels. */
#if defined(__x86_64__)

#include "avx2.h"

#define ROW(what, format)                                                                           \
    [format] = {gck_avx2_##what##_##format##_GCK_F32, gck_avx2_##what##_##format##_GCK_F16,         \
                gck_avx2_##what##_##format##_GCK_BF16}

const gck_isa gck_isa_avx2 = {
    .name = "avx2",
    .encode = {ROW(encode, GCK_E4M3), ROW(encode, GCK_E5M2), ROW(encode, GCK_INT8), ROW(encode, GCK_INT8_PLAIN)},
    .decode = {ROW(decode, GCK_E4M3), ROW(decode, GCK_E5M2), ROW(decode, GCK_INT8), ROW(decode, GCK_INT8_PLAIN)},
};

#else
typedef int gck_isa_avx2_is_empty;       /* C wants something in every file */
#endif
