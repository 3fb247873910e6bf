/* host.h: host entry points shared by the families of group codecs. */
#ifndef GRADCKPT_HOST_H
#define GRADCKPT_HOST_H

#include "group.h"

/* The dtypes every codec of this build takes. */
enum { GCK_FLOATS = GCK_BIT(GCK_F32) | GCK_BIT(GCK_F16) | GCK_BIT(GCK_BF16) };

/* 130 bytes for each of the ceil(numel / 128) groups. */
int64_t gck_group_nbytes(int64_t numel, gck_dtype dtype);

/* Groups [first, last) of x into payload, or back. */
void gck_group_encode(gck_format format, const gck_tensor *x, void *payload, int64_t first, int64_t last);
void gck_group_decode(gck_format format, const void *payload, const gck_tensor *out, int64_t first, int64_t last);

/* A device function where this build has one, else NULL. */
#ifdef GCK_WITH_CUDA
#define GCK_CUDA(function) function
#define GCK_DECLARE_CUDA(codec)                                    \
    int gck_##codec##_encode_cuda(const gck_tensor *x, void *payload); \
    int gck_##codec##_decode_cuda(const void *payload, const gck_tensor *out);
#else
#define GCK_CUDA(function) NULL
#define GCK_DECLARE_CUDA(codec)
#endif

#endif
