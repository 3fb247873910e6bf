/* overflow.cu: pinned memory for the words of overflow.c. */
#include "codec/cuda/launch.cuh"
#include "codec/cuda/overflow.h"

/* Allowed while a stream is being captured: the words are no part of the graph. */
extern "C" uint32_t *gck_overflow_flags_cuda(int device)
{
    void *words = NULL;

    launch_on(device, [&words]() {
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        int status = (int)cudaThreadExchangeStreamCaptureMode(&mode);
        if (status == 0) {
            status = (int)cudaHostAlloc(&words, GCK_OVERFLOW_FLAGS * sizeof(uint32_t),
                                        cudaHostAllocPortable | cudaHostAllocMapped);
            cudaThreadExchangeStreamCaptureMode(&mode);
        }
        return status;
    });
    return (uint32_t *)words;
}
