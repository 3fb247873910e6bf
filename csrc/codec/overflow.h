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

/* Before the work that writes these words is queued on x->stream of a device: those of work that is captured in a
 * graph are never used again, since it may run again and again.  GCK_OK or what asking the device said. */
int gck_overflow_listen(const gck_tensor *x, const gck_how *how, int n);

#ifdef __cplusplus
}
#endif
#endif
