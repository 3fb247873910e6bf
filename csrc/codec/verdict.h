/* verdict.h: the words of gck_verdict_take(), as the codecs' room sees them. */
#ifndef GRADCKPT_VERDICT_H
#define GRADCKPT_VERDICT_H

#include "../gradckpt.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GCK_NVERDICTS = 4096 };

/* Number of a word among those of the devices; no two launches at a time have the same. */
int gck_verdict_slot(const uint32_t *word);

/* The work that writes this word may run again and again (a CUDA graph): never reuse it. */
void gck_verdict_retire(const uint32_t *word);

/* GCK_NVERDICTS words that every device can write, or NULL.  Never freed. */
uint32_t *gck_verdict_words_cuda(int device);

#ifdef __cplusplus
}
#endif
#endif
