/* payload_bytes.c: the bytes of a payload, and the latest payloads. */
#include "engine/payload/payload_bytes.h"

#include "torch/abi.h"
#include "torch/input.h"
#include "torch/tensor.h"

#include <string.h>

/* The memory of a payload's bytes.  Outer saved-tensor hooks may have returned this tensor, so it
 * is checked: a wrong one would be read out of bounds, or as nonsense. */
int gck_payload_view(gck_payload *self, PyObject *buffer, void **data)
{
    gck_dl_tensor dl;
    PyObject *device;
    int shown;

    if (buffer == NULL && self->own.handle != NULL) {
        *data = self->own.data;
        return 0;
    }
    buffer = buffer == NULL ? self->buffer : buffer;
    shown = gck_read_dlpack(&self->state->py, buffer, &dl);
    if (shown < 0) {
        return -1;
    }
    if (!shown || dl.dtype.code != GCK_DL_UINT || dl.dtype.bits != 8 || dl.ndim != 1 || dl.shape[0] != self->nbytes
        || (dl.strides != NULL && self->nbytes > 1 && dl.strides[0] != 1)
        || (dl.device.device_type == GCK_DL_CUDA ? dl.device.device_id : -1) != self->device) {
        device = gck_device_object(&self->state->py, self->device);
        PyErr_Format(PyExc_RuntimeError, "gradckpt: an outer saved-tensor hook returned another tensor (%R) for a "
                     "payload of %lld uint8 bytes on %S; return what was packed",
                     Py_TYPE(buffer), (long long)self->nbytes, device != NULL ? device : Py_None);
        Py_XDECREF(device);
        return -1;
    }
    *data = (char *)dl.data + dl.byte_offset;
    return 0;
}

int gck_payload_work(gck_payload *self, PyObject *tensor, PyObject *buffer, gck_tensor *view, void **bytes,
                     gck_how *how)
{
    const gck_tensor was = {.numel = self->numel, .dtype = self->dtype, .device = self->device};

    *how = (gck_how){self->stochastic ? &self->dither : NULL, self->overflow};
    return gck_payload_view(self, buffer, bytes) < 0 ? -1 : gck_view_again(&self->state->py, tensor, &was, view);
}

void gck_payload_uncount(gck_payload *self)
{
    self->state->stats.live_bytes -= self->live ? self->nbytes : 0;
    self->live = 0;
}

void gck_payload_remember(gck_payload *self)
{
    gck_payload **recent = self->state->recent;

    memmove(&recent[1], &recent[0], (GCK_NRECENT - 1) * sizeof *recent);
    recent[0] = self;
}

void gck_payload_forget(gck_payload *self)
{
    for (int i = 0; i < GCK_NRECENT; i++) {
        if (self->state->recent[i] == self) {
            self->state->recent[i] = NULL;
        }
    }
}
