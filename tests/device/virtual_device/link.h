/* link.h: copies between the device and the host, for gradckpt's offload/. */
#ifndef VIRTUAL_DEVICE_LINK_H
#define VIRTUAL_DEVICE_LINK_H

#include "gradckpt.h"

namespace virtual_device {

extern const gck_link device_link;

}  /* namespace virtual_device */

#endif
