/* cuda_error.cu: a sentence about an error of CUDA: its name, its text, and what to do. */
#include "codec/cuda/launch.cuh"

#include <stdio.h>

enum {
    INSUFFICIENT_DRIVER = 35, INVALID_DEVICE_FUNCTION = 98, NO_DEVICE = 100, NO_KERNEL_IMAGE = 209,
    UNSUPPORTED_PTX = 222, DRIVER_MISMATCH = 803, NOT_COMPATIBLE = 804, CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
};
enum { LEAST_CAPABILITY = 75, MOST_CARDS = 64, LENGTH = 512 };

/* Errors that a kernel caused, perhaps not one of ours: then every call of the process returns them.  Numbers, because
 * older toolkits do not have all of the names. */
static const int sticky[] = {
    214 /* ECCUncorrectable */, 220 /* NvlinkUncorrectable */, 226 /* Contained */, 700 /* IllegalAddress */,
    702 /* LaunchTimeout */, 710 /* Assert */, 714 /* HardwareStackError */, 715 /* IllegalInstruction */,
    716 /* MisalignedAddress */, 717 /* InvalidAddressSpace */, 718 /* InvalidPc */, 719 /* LaunchFailure */,
    721 /* TensorMemoryLeak */,
};

static bool is_sticky(int status)
{
    bool found = false;

    for (const int one : sticky) {
        found |= status == one;
    }
    return found;
}

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
    int served;

    advice[0] = '\0';
    if (is_sticky(status)) {
        snprintf(advice, size, "; an earlier kernel may have failed: set CUDA_LAUNCH_BLOCKING=1");
        return;
    }
    switch (status) {
    case INVALID_DEVICE_FUNCTION:
    case NO_KERNEL_IMAGE:
        served = list_capabilities(capabilities, sizeof capabilities);
        if (served == 0) {
            snprintf(advice, size, "; pass compress=None (capability %s, below 7.5)", capabilities);
        } else {
            snprintf(advice, size, "; rebuild with GRADCKPT_CUDA_ARCHS%s%s (built for %s)",
                     served > 0 ? "=" : "", capabilities, GCK_CUDA_ARCHS);
        }
        break;
    case INSUFFICIENT_DRIVER:
    case UNSUPPORTED_PTX:
    case DRIVER_MISMATCH:
    case NOT_COMPATIBLE:
        snprintf(advice, size, "; update the driver");
        break;
    case NO_DEVICE:
        snprintf(advice, size, "; check nvidia-smi and CUDA_VISIBLE_DEVICES");
        break;
    case CAPTURE_UNSUPPORTED:
    case CAPTURE_INVALIDATED:
        snprintf(advice, size, "; run the region once before the capture");
        break;
    default:
        break;
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
