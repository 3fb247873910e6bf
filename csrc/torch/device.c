/* device.c: the numbers of devices. */
#include "torch/device.h"

int gck_device_of_dlpack(gck_dl_device device)
{
    const gck_device_kind *kind;

    if (device.device_type == GCK_DL_CPU) {
        return -1;
    }
    for (int k = 0; (kind = gck_device_kind_at(k)) != NULL; k++) {
        if (kind->dlpack == device.device_type) {
            return gck_device_number(k, device.device_id);
        }
    }
    return GCK_NO_DEVICE;
}

int32_t gck_device_type(int device)
{
    return device < 0 ? gck_torch.aoti_torch_device_type_cpu()
         : gck_device_kind_of(device) == 0 ? gck_torch.aoti_torch_device_type_cuda()
         : gck_torch.aoti_torch_device_type_privateuse1 != NULL ? gck_torch.aoti_torch_device_type_privateuse1() : -1;
}

const char *gck_device_error(int device, int status)
{
    const gck_device_kind *kind = device >= 0 ? gck_device_kind_at(gck_device_kind_of(device)) : NULL;

    return status > 0 && kind != NULL && kind->error != NULL ? kind->error(status) : gck_status_text(status);
}

int gck_device_of_torch(int32_t type, int32_t index)
{
    if (type == gck_device_type(-1)) {
        return -1;
    }
    for (int k = 0; gck_device_kind_at(k) != NULL; k++) {
        if (type == gck_device_type(gck_device_number(k, 0))) {
            return gck_device_number(k, index);
        }
    }
    return GCK_NO_DEVICE;
}

int gck_stream_of(const gck_dl_exchange *dlpack, int device, void **stream)
{
    const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(device));
    const int index = gck_device_index(device);

    return kind->stream != NULL ? kind->stream(index, stream)
         : dlpack != NULL ? dlpack->current_work_stream(kind->dlpack, index, stream)
         : gck_torch.aoti_torch_get_current_cuda_stream == NULL
           || gck_torch.aoti_torch_get_current_cuda_stream(index, stream);
}
