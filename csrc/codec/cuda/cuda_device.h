/* cuda_device.h: what the others call of CUDA, where this build has it. */
#ifndef GRADCKPT_CUDA_DEVICE_H
#define GRADCKPT_CUDA_DEVICE_H

#include "gradckpt.h"

/* The device functions of a codec. */
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

#ifdef __cplusplus
extern "C" {
#endif

/* Members of gck_device_kind (devices.c). */
int       gck_is_captured_cuda(int index, void *stream, int *captured);
uint32_t *gck_words_cuda(int index, int n);
int       gck_compare_cuda(int index, void *stream, gck_bytes a, gck_bytes b, gck_lengths lengths, uint32_t *word);
extern const gck_link gck_link_cuda;

#ifdef __cplusplus
}
#endif
#endif
