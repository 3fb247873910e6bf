/* cuda_stubs.h: csrc/codec/cuda/devices.c over a CUDA without streams or kernels; gck_cuda_check() is the includer's. */
#ifndef CUDA_STUBS_H
#define CUDA_STUBS_H

#define GCK_WITH_CUDA 1
#include "codec/cuda/devices.c"

const gck_link gck_link_cuda = {.copy_out = NULL};

int gck_is_captured_cuda(int index, void *stream, int *captured) { return *captured = 0; }
uint32_t *gck_words_cuda(int index, int n) { return NULL; }
const char *gck_cuda_error(int status) { return gck_status_text(status); }

int gck_compare_cuda(int index, void *stream, gck_bytes a, gck_bytes b, gck_lengths lengths, uint32_t *word)
{
    return GCK_E_DEVICE;
}

#endif
