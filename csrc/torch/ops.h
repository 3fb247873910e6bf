/* ops.h: torch.ops.gradckpt.encode and .decode. */
#ifndef GRADCKPT_OPS_H
#define GRADCKPT_OPS_H

#include "gradckpt.h"

/* Register both for CPU and CUDA, once per process.  NULL when good, else what torch rejected,
 * which every later call returns too: borrowed, valid for ever.  Needs gck_torch. */
const char *gck_ops_register(void);

/* Add a kind of device that is torch's PrivateUse1, and register them for it.  0; -1: there is no room, or torch
 * rejected it. */
int gck_ops_add(const gck_device_kind *kind);

#endif
