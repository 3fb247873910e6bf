/* kernels_avx2.h: the AVX2 kernels. */
#ifndef GRADCKPT_KERNELS_AVX2_H
#define GRADCKPT_KERNELS_AVX2_H

#include "codec/portable/kernels.h"

extern const gck_kernels gck_kernels_avx2;

GCK_GROUP_CODECS(GCK_DECLARE_ROW, avx2)
GCK_DECLARE_OTHER_KERNELS(avx2)
GCK_DECLARE_NONZEROS_KERNELS(avx2)

#endif
