/* overflow.h: the words of gck_overflow_take(), as csrc/codec sees them. */
#ifndef GRADCKPT_OVERFLOW_H
#define GRADCKPT_OVERFLOW_H

#include "gradckpt.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GCK_OVERFLOW_FLAGS = 4096 };

/* The number of a word among those of the devices; no two launches share one at a time. */
int gck_overflow_slot(const uint32_t *word);

/* Never reuse this word: the work that writes it may run again and again (a CUDA graph). */
void gck_overflow_retire(const uint32_t *word);

/* GCK_OVERFLOW_FLAGS words that every device can write, or NULL. They are never freed. */
uint32_t *gck_overflow_flags_cuda(int device);

#ifdef __cplusplus
}
#endif
#endif
