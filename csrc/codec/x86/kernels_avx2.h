/* kernels_avx2.h: the AVX2 kernels. */
#ifndef GRADCKPT_KERNELS_AVX2_H
#define GRADCKPT_KERNELS_AVX2_H

#include "codec/kernels.h"

extern const gck_kernels gck_kernels_avx2;

#define GCK_GROUP_CODEC(name, id, format, simd, ...) GCK_DECLARE_##simd(avx2, format)
#include "codec/codecs.def"
GCK_DECLARE_OTHER_KERNELS(avx2)

#endif
