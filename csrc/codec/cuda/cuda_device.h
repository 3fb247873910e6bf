/* cuda_device.h: what CUDA does for the table of kinds of devices (codec/devices.c). */
#ifndef GRADCKPT_CUDA_DEVICE_H
#define GRADCKPT_CUDA_DEVICE_H

#include "gradckpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Members of gck_device_kind. */
int       gck_is_captured_cuda(int index, void *stream, int *captured);
uint32_t *gck_words_cuda(int index, int n);
int       gck_compare_cuda(int index, void *stream, gck_bytes a, gck_bytes b, gck_lengths lengths, uint32_t *word);
extern const gck_link gck_link_cuda;

#ifdef __cplusplus
}
#endif
#endif
