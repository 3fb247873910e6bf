/* cuda_device.cu: streams and pinned memory. */
#include "codec/cuda/launch.cuh"
#include "codec/cuda/cuda_device.h"

/* The legacy default stream cannot be captured, and asking it fails while another one is.  Others need no device. */
extern "C" int gck_is_captured_cuda(int, void *stream, int *captured)
{
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const int status = stream != NULL ? (int)cudaStreamIsCapturing((cudaStream_t)stream, &capture) : (int)cudaSuccess;

    if (status != (int)cudaSuccess) {
        (void)cudaGetLastError();                /* said here, and not by the next launch */
    }
    *captured = capture != cudaStreamCaptureStatusNone;
    return status;
}

/* Allowed while a stream is being captured, as launch_on() says: the words are no part of the graph. */
extern "C" uint32_t *gck_words_cuda(int index, int n)
{
    void *words = NULL;

    launch_on(index, [&words, n]() {
        return (int)cudaHostAlloc(&words, (size_t)n * sizeof(uint32_t), cudaHostAllocPortable | cudaHostAllocMapped);
    });
    return (uint32_t *)words;
}
