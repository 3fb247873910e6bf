/* stream.c: asks torch for the current stream of a device. */
#include "torch/stream.h"

int gck_stream_of_device(const gck_dl_exchange *dlpack, int device, void **stream)
{
    return dlpack->current_work_stream(GCK_DL_CUDA, device, stream);
}

int gck_stream_of_operator(int device, void **stream)
{
    return gck_torch.aoti_torch_get_current_cuda_stream == NULL
        || gck_torch.aoti_torch_get_current_cuda_stream(device, stream);
}
