/* saved_reason.h: why a saved tensor stays uncompressed, as far as that is known when it is packed. */
#ifndef GRADCKPT_SAVED_REASON_H
#define GRADCKPT_SAVED_REASON_H

#include "engine/saved/saved_form.h"

/* Whether the node that saves a tensor has to be seen first: not; yes; only if it is a Function in Python, else the
 * tensor stays as it is; likewise, and the tensor is a result of that node, or a view of one. */
typedef enum { GCK_DECIDED, GCK_WAITS, GCK_IF_FUNCTION, GCK_IF_FUNCTION_OF_RESULT } gck_saved_when;

/* The reason why x, which the node `node` with the number `made` has made, stays uncompressed when the node `number`
 * is being made; GCK_SKIP_EXACT when that depends on *as, or on *when; GCK_COMPRESS with *as when nothing needs it
 * exactly; -1.  tracing: as gck_tracing() said, -1: ask. */
int gck_saved_reason(const gck_saved_hooks *self, gck_input *in, PyObject *node, int64_t made, int64_t number,
                     int tracing, gck_saved_as *as, gck_saved_when *when);

#endif
