/* overflow.h: the words of gck_verdict_take(), as csrc/codec sees them. */
#ifndef GRADCKPT_OVERFLOW_H
#define GRADCKPT_OVERFLOW_H

#include "gradckpt.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GCK_NVERDICTS = 4096 };

/* The number of a word among those of the devices; no two launches share one at a time. */
int gck_verdict_slot(const uint32_t *word);

/* Never reuse this word: the work that writes it may run again and again (a CUDA graph). */
void gck_verdict_retire(const uint32_t *word);

/* GCK_NVERDICTS words that every device can write, or NULL. They are never freed. */
uint32_t *gck_verdict_words_cuda(int device);

#ifdef __cplusplus
}
#endif
#endif
