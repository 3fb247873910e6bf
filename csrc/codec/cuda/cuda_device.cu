/* cuda_device.cu: streams, pinned memory, and copies between a card and the host for offload/: gck_link. */
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

/* ---- copies: gck_link ---- */

/* One call of CUDA with the card current: its status. */
#define ON_CARD(index, call) launch_on(index, [=]() { return (int)(call); })

static int stream_new(int index, void **stream)
{
    return ON_CARD(index, cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking));
}

static void stream_free(int index, void *stream)
{
    ON_CARD(index, cudaStreamDestroy((cudaStream_t)stream));
}

static int event_new(int index, void **event)
{
    return ON_CARD(index, cudaEventCreateWithFlags((cudaEvent_t *)event, cudaEventDisableTiming));
}

static void event_free(int index, void *event)
{
    ON_CARD(index, cudaEventDestroy((cudaEvent_t)event));
}

static int record(int index, void *event, void *stream)
{
    return ON_CARD(index, cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream));
}

static int wait(int index, void *stream, void *event)
{
    return ON_CARD(index, cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, 0));
}

/* What is not done yet is an answer and no error. */
static int is_done(int index, void *event, int *done)
{
    return launch_on(index, [=]() {
        const cudaError_t status = cudaEventQuery((cudaEvent_t)event);
        *done = status == cudaSuccess;
        if (status == cudaErrorNotReady) {
            (void)cudaGetLastError();
        }
        return status == cudaErrorNotReady ? GCK_OK : (int)status;
    });
}

static int finish(int index, void *event)
{
    return ON_CARD(index, cudaEventSynchronize((cudaEvent_t)event));
}

static int copy_out(int index, void *stream, void *host, const void *device, int64_t nbytes)
{
    return ON_CARD(index, cudaMemcpyAsync(host, device, (size_t)nbytes, cudaMemcpyDeviceToHost, (cudaStream_t)stream));
}

static int copy_in(int index, void *stream, void *device, const void *host, int64_t nbytes)
{
    return ON_CARD(index, cudaMemcpyAsync(device, host, (size_t)nbytes, cudaMemcpyHostToDevice, (cudaStream_t)stream));
}

/* A refusal is an answer, too: the memory is then used as it is. */
static int pin(int index, void *memory, int64_t nbytes)
{
    return launch_on(index, [=]() {
        const int status = (int)cudaHostRegister(memory, (size_t)nbytes, cudaHostRegisterPortable);
        (void)cudaGetLastError();
        return status;
    });
}

static void unpin(int index, void *memory)
{
    launch_on(index, [=]() {
        const int status = (int)cudaHostUnregister(memory);
        (void)cudaGetLastError();
        return status;
    });
}

static int is_shared(int index, int *shared)
{
    return (int)cudaDeviceGetAttribute(shared, cudaDevAttrIntegrated, index);
}

/* ---- captured graphs ---- */

/* Its number and its graph; 0: none.  The legacy default stream cannot be captured, and asking it fails while another
 * one is. */
static int capture_of(void *stream, uint64_t *id, cudaGraph_t *graph)
{
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    unsigned long long number = 0;
    int status = GCK_OK;

    if (stream != NULL) {
#if CUDART_VERSION >= 13000
        status = (int)cudaStreamGetCaptureInfo((cudaStream_t)stream, &capture, &number, graph, NULL, NULL, NULL);
#else
        status = (int)cudaStreamGetCaptureInfo_v2((cudaStream_t)stream, &capture, &number, graph, NULL, NULL);
#endif
    }
    *id = status == GCK_OK && capture == cudaStreamCaptureStatusActive ? number + 1 : 0;     /* CUDA may begin with 0 */
    return status;
}

static int graph_of(int, void *stream, uint64_t *graph)
{
    const int status = capture_of(stream, graph, NULL);

    if (status != GCK_OK) {
        (void)cudaGetLastError();                /* said here, and not by the next launch */
    }
    return status;
}

/* Nodes that leave a stream's set so need not be joined when the capture ends. */
static int unjoin(int index, void *stream)
{
    return launch_on(index, [=]() {
#if CUDART_VERSION >= 13000
        return (int)cudaStreamUpdateCaptureDependencies((cudaStream_t)stream, NULL, NULL, 0,
                                                        cudaStreamSetCaptureDependencies);
#else
        return (int)cudaStreamUpdateCaptureDependencies((cudaStream_t)stream, NULL, 0,
                                                        cudaStreamSetCaptureDependencies);
#endif
    });
}

/* An object that the graph owns, and the executable graphs made of it. */
static int at_end_of_graph(int index, void *stream, void (*ended)(void *), void *data)
{
    return launch_on(index, [=]() {
        cudaUserObject_t object;
        cudaGraph_t graph = NULL;
        uint64_t id;
        int status = capture_of(stream, &id, &graph);
        if (status == GCK_OK) {
            status = (int)cudaUserObjectCreate(&object, data, ended, 1, cudaUserObjectNoDestructorSync);
        }
        return status != GCK_OK ? status : (int)cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    });
}

extern "C" const gck_link gck_link_cuda = {
    stream_new, stream_free, event_new, event_free, record, wait, is_done, finish, copy_out, copy_in, pin, unpin,
    is_shared, graph_of, unjoin, at_end_of_graph,
};
