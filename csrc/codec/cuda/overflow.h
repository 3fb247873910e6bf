/* overflow.h: the words of gck_overflow_take(), as kernels see them. */
#ifndef GRADCKPT_OVERFLOW_H
#define GRADCKPT_OVERFLOW_H

#include "gradckpt.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GCK_OVERFLOW_FLAGS = 4096 };

/* The number of a word among those of the devices; no two launches share one at a time. */
int gck_overflow_slot(const uint32_t *word);

#ifdef __cplusplus
}
#endif
#endif
