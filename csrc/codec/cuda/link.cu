/* link.cu: copies between a card and the host, for offload/: gck_link. */
#include "codec/cuda/launch.cuh"
#include "codec/cuda/cuda_device.h"

static int stream_new(int index, void **stream)
{
    return launch_on(index, [=]() {
        return (int)cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking);
    });
}

static void stream_free(int index, void *stream)
{
    launch_on(index, [=]() { return (int)cudaStreamDestroy((cudaStream_t)stream); });
}

static int event_new(int index, void **event)
{
    return launch_on(index, [=]() {
        return (int)cudaEventCreateWithFlags((cudaEvent_t *)event, cudaEventDisableTiming);
    });
}

static void event_free(int index, void *event)
{
    launch_on(index, [=]() { return (int)cudaEventDestroy((cudaEvent_t)event); });
}

static int record(int index, void *event, void *stream)
{
    return launch_on(index, [=]() { return (int)cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream); });
}

static int wait(int index, void *stream, void *event)
{
    return launch_on(index, [=]() { return (int)cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, 0); });
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
    return launch_on(index, [=]() { return (int)cudaEventSynchronize((cudaEvent_t)event); });
}

static int copy_out(int index, void *stream, void *host, const void *device, int64_t nbytes)
{
    return launch_on(index, [=]() {
        return (int)cudaMemcpyAsync(host, device, (size_t)nbytes, cudaMemcpyDeviceToHost, (cudaStream_t)stream);
    });
}

static int copy_in(int index, void *stream, void *device, const void *host, int64_t nbytes)
{
    return launch_on(index, [=]() {
        return (int)cudaMemcpyAsync(device, host, (size_t)nbytes, cudaMemcpyHostToDevice, (cudaStream_t)stream);
    });
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

extern "C" const gck_link gck_link_cuda = {
    stream_new, stream_free, event_new, event_free, record, wait, is_done, finish, copy_out, copy_in, pin, unpin,
    is_shared,
};
