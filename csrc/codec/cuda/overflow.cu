/* overflow.cu: pinned memory for the words of overflow.c. */
#include "codec/cuda/launch.cuh"
#include "codec/cuda/overflow.h"

/* Allowed while a stream is being captured, as launch_on() says: the words are no part of the graph. */
extern "C" uint32_t *gck_overflow_flags_cuda(int device)
{
    void *words = NULL;

    launch_on(device, [&words]() {
        return (int)cudaHostAlloc(&words, GCK_OVERFLOW_FLAGS * sizeof(uint32_t),
                                  cudaHostAllocPortable | cudaHostAllocMapped);
    });
    return (uint32_t *)words;
}
