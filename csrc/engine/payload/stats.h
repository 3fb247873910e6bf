/* stats.h: the counters behind gradckpt.stats(). */
#ifndef GRADCKPT_STATS_H
#define GRADCKPT_STATS_H

#include "engine/state.h"

/* _C.stats(): the counters as a dict; _C.reset_stats(): zero, except those of live payloads. */
PyObject *gck_stats_py(PyObject *module, PyObject *unused);
PyObject *gck_reset_stats_py(PyObject *module, PyObject *unused);

/* Add the state of a generator that is kept for a recompute, unless the one counted last is this object: add
 * its bytes to *nbytes, too.  0 or -1. */
int gck_count_random(gck_state *state, PyObject *random, int64_t *nbytes);
/* What counted these bytes goes. */
void gck_uncount_random(gck_state *state, int64_t nbytes);

/* Return (peak_live_bytes, peak_bytes), which begin anew with what is alive now. */
PyObject *gck_restart_peak_py(PyObject *module, PyObject *unused);

#endif
