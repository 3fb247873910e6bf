/* device.h: the numbers of devices here (gradckpt.h), those that torch has for them, and streams. */
#ifndef GRADCKPT_DEVICE_H
#define GRADCKPT_DEVICE_H

#include "gradckpt.h"
#include "torch/abi.h"

enum { GCK_NO_DEVICE = -2 };     /* neither the host nor a device of a known kind */

/* The number of a device, -1 for the host, or GCK_NO_DEVICE: from DLPack's numbers; from those of torch's C
 * interface. */
int gck_device_of_dlpack(gck_dl_device device);
int gck_device_of_torch(int32_t type, int32_t index);

/* What a status of codec work on a device means; as gck_status_text(). */
const char *gck_device_error(int device, int status);

/* torch's number of its type.  -1: this torch does not tell. */
int32_t gck_device_type(int device);

/* torch's current stream of a device.  0; not 0: torch does not tell, and with `dlpack` (NULL: there is no GIL) an
 * exception is set. */
int gck_stream_of(const gck_dl_exchange *dlpack, int device, void **stream);

#endif
