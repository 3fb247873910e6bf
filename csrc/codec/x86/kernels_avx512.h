/* kernels_avx512.h: the AVX-512 kernels. */
#ifndef GRADCKPT_KERNELS_AVX512_H
#define GRADCKPT_KERNELS_AVX512_H

#include "codec/portable/kernels.h"

extern const gck_kernels gck_kernels_avx512;

GCK_GROUP_CODECS(GCK_DECLARE_ROW, avx512)
GCK_DECLARE_OTHER_KERNELS(avx512)

#endif
