/* devices.c: the kinds of devices, a fact about the process, and CUDA's entry. */
#include "codec/cuda/cuda_device.h"

#include <pthread.h>

#ifndef GCK_WITH_CUDA
const char *gck_cuda_archs(void) { return ""; }

int gck_cuda_check(int *driver, int *runtime)
{
    *driver = *runtime = 0;
    return GCK_E_DEVICE;
}

const char *gck_cuda_error(int status)
{
    (void)status;
    return "an error of CUDA, which this build does not have";
}
#endif

static int encode_cuda(const gck_codec *codec, const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n)
{
    return codec->encode != NULL ? codec->encode(x, to, how, n) : GCK_E_DEVICE;
}

static int decode_cuda(const gck_codec *codec, const gck_bytes *from, const gck_tensor *out, int n)
{
    return codec->decode != NULL ? codec->decode(from, out, n) : GCK_E_DEVICE;
}

static const gck_device_kind cuda = {
    .name = "cuda",
    .dlpack = 2,                 /* kDLCUDA */
    .check = gck_cuda_check,
    .is_captured = GCK_CUDA(gck_is_captured_cuda),
    .encode = encode_cuda,
    .decode = decode_cuda,
    .compare = GCK_CUDA(gck_compare_cuda),
    .words = GCK_CUDA(gck_words_cuda),
    .error = gck_cuda_error,
    .link = GCK_CUDA(&gck_link_cuda),
};

static const gck_device_kind *kinds[GCK_KINDS] = {&cuda};
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

const gck_device_kind *gck_device_kind_at(int number)
{
    return number >= 0 && number < GCK_KINDS ? kinds[number] : NULL;
}

int gck_device_add(const gck_device_kind *kind)
{
    int number = 1;

    pthread_mutex_lock(&mutex);
    while (number < GCK_KINDS && kinds[number] != NULL && kinds[number] != kind) {
        number++;
    }
    if (number < GCK_KINDS) {
        kinds[number] = kind;
    }
    pthread_mutex_unlock(&mutex);
    return number < GCK_KINDS ? number : GCK_E_RANGE;
}
