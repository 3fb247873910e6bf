/* ops.h: torch.ops.gradckpt.encode and .decode. */
#ifndef GRADCKPT_OPS_H
#define GRADCKPT_OPS_H

/* Register both for CPU and CUDA, once per process.  NULL when good, else what torch rejected,
 * which every later call returns too: borrowed, valid for ever.  Needs gck_torch. */
const char *gck_ops_register(void);

/* Register them for a dispatch key, e.g. "PrivateUse1".  0; not 0: torch rejected it. */
int gck_ops_implement(const char *key);

#endif
