/* ops.h: torch.ops.gradckpt.encode and .decode. */
#ifndef GRADCKPT_OPS_H
#define GRADCKPT_OPS_H

/* Register both for CPU and CUDA, once per process.  NULL when good, else what torch refused, and
 * so at every later call: borrowed, lives for ever.  Needs gck_torch. */
const char *gck_ops_register(void);

#endif
