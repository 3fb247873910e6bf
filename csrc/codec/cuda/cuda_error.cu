/* cuda_error.cu: a sentence about an error of CUDA: its name, its text, and what to do. */
#include "codec/cuda/launch.cuh"

#include <stdio.h>

enum { INVALID_DEVICE_FUNCTION = 98, NO_KERNEL_IMAGE = 209 };
enum { LEAST_CAPABILITY = 75, MOST_CARDS = 64, LENGTH = 512 };

#define AFTER_KERNEL "an earlier kernel may have failed: set CUDA_LAUNCH_BLOCKING=1"
#define UPDATE "update the driver"
#define RUN_BEFORE "run the region once before the capture"

/* What to do about an error.  Numbers, because older toolkits do not have all of the names. */
static const struct { int status; const char *advice; } hints[] = {
    {35 /* InsufficientDriver */, UPDATE}, {222 /* UnsupportedPtxVersion */, UPDATE},
    {803 /* SystemDriverMismatch */, UPDATE}, {804 /* CompatNotSupportedOnDevice */, UPDATE},
    {100 /* NoDevice */, "check nvidia-smi and CUDA_VISIBLE_DEVICES"},
    {900 /* StreamCaptureUnsupported */, RUN_BEFORE}, {901 /* StreamCaptureInvalidated */, RUN_BEFORE},
    /* What a kernel caused, perhaps not one of ours: then every call of the process returns it. */
    {214 /* ECCUncorrectable */, AFTER_KERNEL}, {220 /* NvlinkUncorrectable */, AFTER_KERNEL},
    {226 /* Contained */, AFTER_KERNEL}, {700 /* IllegalAddress */, AFTER_KERNEL},
    {702 /* LaunchTimeout */, AFTER_KERNEL}, {710 /* Assert */, AFTER_KERNEL},
    {714 /* HardwareStackError */, AFTER_KERNEL}, {715 /* IllegalInstruction */, AFTER_KERNEL},
    {716 /* MisalignedAddress */, AFTER_KERNEL}, {717 /* InvalidAddressSpace */, AFTER_KERNEL},
    {718 /* InvalidPc */, AFTER_KERNEL}, {719 /* LaunchFailure */, AFTER_KERNEL},
    {721 /* TensorMemoryLeak */, AFTER_KERNEL},
};

/* The compute capabilities of this machine's cards, those that kernels can be built for first, as
 * GRADCKPT_CUDA_ARCHS takes them.  How many of these there are; -1: none is known. */
static int list_capabilities(char *text, size_t size)
{
    int cards = 0, all[MOST_CARDS], n = 0, served = 0;
    size_t used = 0;

    if (cudaGetDeviceCount(&cards) != cudaSuccess) {
        cards = 0;
    }
    for (int card = 0; card < cards && card < MOST_CARDS; card++) {
        int major = 0, minor = 0, known = 0;
        if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, card) != cudaSuccess
            || cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, card) != cudaSuccess) {
            continue;
        }
        for (int i = 0; i < n; i++) {
            known |= all[i] == 10 * major + minor;
        }
        if (!known) {
            all[n++] = 10 * major + minor;
            served += 10 * major + minor >= LEAST_CAPABILITY;
        }
    }
    text[0] = '\0';
    for (int i = 0; i < n && used < size; i++) {
        if (served == 0 || all[i] >= LEAST_CAPABILITY) {
            used += (size_t)snprintf(text + used, size - used, "%s%d.%d", used > 0 ? ";" : "", all[i] / 10,
                                     all[i] % 10);
        }
    }
    return n > 0 ? served : -1;
}

/* What to do, if the user can do something. */
static void advise(int status, char *advice, size_t size)
{
    char capabilities[LENGTH / 4];

    advice[0] = '\0';
    for (const auto &one : hints) {
        if (one.status == status) {
            snprintf(advice, size, "; %s", one.advice);
        }
    }
    if (status != INVALID_DEVICE_FUNCTION && status != NO_KERNEL_IMAGE) {
        return;
    }
    const int served = list_capabilities(capabilities, sizeof capabilities);
    if (served == 0) {
        snprintf(advice, size, "; pass compress=None (capability %s, below 7.5)", capabilities);
    } else {
        snprintf(advice, size, "; rebuild with GRADCKPT_CUDA_ARCHS%s%s (built for %s)", served > 0 ? "=" : "",
                 capabilities, GCK_CUDA_ARCHS);
    }
}

extern "C" {

const char *gck_cuda_error(int status)
{
    static __thread char text[LENGTH];
    const char *name = cudaGetErrorName((cudaError_t)status);

    if (status == GCK_CUDA_OUT_OF_MEMORY) {        /* its last words, by which frameworks know it */
        snprintf(text, sizeof text, "CUDA error %s; pass a smaller batch, as the device is out of memory.", name);
        return text;
    }
    char advice[LENGTH / 2];
    advise(status, advice, sizeof advice);
    (void)cudaGetLastError();                      /* of these questions */
    snprintf(text, sizeof text, "CUDA error %s: %s%s", name, cudaGetErrorString((cudaError_t)status), advice);
    return text;
}

}
