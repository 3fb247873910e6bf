/* kernels_portable.c: the table of the portable kernels. */
#include "codec/portable/kernels_portable.h"

#define ROW(_, name, id, format, ...)                                 \
    .encode[format] = GCK_SIMD(portable, encode, format),             \
    .encode_noisy[format] = GCK_SIMD(portable, encode_noisy, format), \
    .decode[format] = GCK_SIMD(portable, decode, format),

const gck_kernels gck_kernels_portable = {
    .name = "scalar",
    GCK_GROUP_CODECS(ROW, _)
    GCK_OTHER_KERNELS(portable)
    GCK_NONZEROS_KERNELS(portable)
};
