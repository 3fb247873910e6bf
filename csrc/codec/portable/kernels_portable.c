/* kernels_portable.c: the table of the portable kernels. */
#include "codec/portable/kernels_portable.h"

const gck_kernels gck_kernels_portable = {
    .name = "scalar",
#define GCK_GROUP_CODEC(name, id, format, ...)                      \
    .encode[format] = GCK_SIMD(portable, encode, format),           \
    .encode_noisy[format] = GCK_SIMD(portable, encode_noisy, format), \
    .decode[format] = GCK_SIMD(portable, decode, format),
#include "codec/codecs.def"
    GCK_OTHER_KERNELS(portable)
};
