/* group_host.h: host entry points shared by the families of group codecs. */
#ifndef GRADCKPT_GROUP_HOST_H
#define GRADCKPT_GROUP_HOST_H

#include "codec/format/group.h"

/* The dtypes that every codec of this build takes. */
enum { GCK_FLOATS = GCK_BIT(GCK_F32) | GCK_BIT(GCK_F16) | GCK_BIT(GCK_BF16) };

/* Bytes per group: codes, and the words beside them. */
#define GCK_GROUP_BYTES(format) (GCK_CODE_BYTES(format) + 2 * GCK_SIDE_WORDS(format))
#define GCK_GROUP_SIZE(format)                                            \
    {                                                                     \
        [GCK_F32] = {0, GCK_GROUP_BYTES(format), 0},                      \
        [GCK_F16] = {0, GCK_GROUP_BYTES(format), 0},                      \
        [GCK_BF16] = {0, GCK_GROUP_BYTES(format), 0},                     \
    }

/* Groups [first, last) of x into payload, or back. */
int gck_group_encode(gck_format format, const gck_tensor *x, void *payload, const gck_how *how, int64_t first,
                     int64_t last);
void gck_group_decode(gck_format format, const void *payload, const gck_tensor *out, int64_t first, int64_t last);

/* A device function where this build has one, else NULL. */
#ifdef GCK_WITH_CUDA
#define GCK_CUDA(function) function
#define GCK_DECLARE_CUDA(codec)                                                                     \
    int gck_##codec##_encode_cuda(const gck_tensor *x, void *const *payloads, const gck_how *how, int n); \
    int gck_##codec##_decode_cuda(const void *const *payloads, const gck_tensor *out, int n);
#else
#define GCK_CUDA(function) NULL
#define GCK_DECLARE_CUDA(codec)
#endif

#endif
