/* kernels_avx512.c: the table of the AVX-512 kernels. */
#if defined(__x86_64__)

#include "codec/x86/kernels_avx2.h"
#include "codec/x86/kernels_avx512.h"

#define ROW(_, name, id, format, simd, ...)                           \
    .encode[format] = GCK_##simd(avx512, encode, format),             \
    .encode_noisy[format] = GCK_##simd(avx512, encode_noisy, format), \
    .decode[format] = GCK_##simd(avx512, decode, format),

const gck_kernels gck_kernels_avx512 = {
    .name = "avx512",
    GCK_GROUP_CODECS(ROW, _)
    GCK_OTHER_KERNELS(avx512)
    GCK_NONZEROS_KERNELS(avx2)               /* faster: 16 values at a time gain nothing (docs/codecs.md) */
};

#else
typedef int gck_kernels_avx512_is_empty;  /* ISO C requires a declaration in every file */
#endif
