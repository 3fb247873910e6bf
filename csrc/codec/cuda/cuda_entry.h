/* cuda_entry.h: the device functions of a codec, where this build has them. */
#ifndef GRADCKPT_CUDA_ENTRY_H
#define GRADCKPT_CUDA_ENTRY_H

#include "gradckpt.h"

#ifdef GCK_WITH_CUDA
#define GCK_CUDA(function) function
#define GCK_DECLARE_CUDA(codec)                                                                         \
    int gck_##codec##_encode_cuda(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n); \
    int gck_##codec##_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n);
#else
#define GCK_CUDA(function) NULL
#define GCK_DECLARE_CUDA(codec)
#endif
#define GCK_NO_CUDA(function) NULL

#endif
