/* kernels_avx2.c: the table of the AVX2 kernels. */
#if defined(__x86_64__)

#include "codec/x86/kernels_avx2.h"

#define ROW(_, name, id, format, simd, ...)                         \
    .encode[format] = GCK_##simd(avx2, encode, format),             \
    .encode_noisy[format] = GCK_##simd(avx2, encode_noisy, format), \
    .decode[format] = GCK_##simd(avx2, decode, format),

const gck_kernels gck_kernels_avx2 = {
    .name = "avx2",
    GCK_GROUP_CODECS(ROW, _)
    GCK_OTHER_KERNELS(avx2)
    GCK_NONZEROS_KERNELS(avx2)
};

#else
typedef int gck_kernels_avx2_is_empty;  /* ISO C requires a declaration in every file */
#endif
