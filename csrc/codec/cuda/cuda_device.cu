/* cuda_device.cu: streams and pinned memory. */
#include "codec/cuda/launch.cuh"
#include "codec/cuda/cuda_device.h"

extern "C" int gck_is_captured_cuda(int index, void *stream, int *captured)
{
    return launch_on(index, [=]() {
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        const int status = (int)cudaStreamIsCapturing((cudaStream_t)stream, &capture);
        *captured = capture != cudaStreamCaptureStatusNone;
        return status;
    });
}

/* Allowed while a stream is being captured: the words are no part of the graph. */
extern "C" uint32_t *gck_words_cuda(int index, int n)
{
    void *words = NULL;

    launch_on(index, [&words, n]() {
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        int status = (int)cudaThreadExchangeStreamCaptureMode(&mode);
        if (status == 0) {
            status = (int)cudaHostAlloc(&words, (size_t)n * sizeof(uint32_t),
                                        cudaHostAllocPortable | cudaHostAllocMapped);
            cudaThreadExchangeStreamCaptureMode(&mode);
        }
        return status;
    });
    return (uint32_t *)words;
}
