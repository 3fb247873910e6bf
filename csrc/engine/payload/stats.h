/* stats.h: the counters behind gradckpt.stats(). */
#ifndef GRADCKPT_STATS_H
#define GRADCKPT_STATS_H

#include "engine/state.h"

/* _C.stats(): the counters as a dict; _C.reset_stats(): zero, except those of live payloads. */
PyObject *gck_stats_py(PyObject *module, PyObject *unused);
PyObject *gck_reset_stats_py(PyObject *module, PyObject *unused);

/* Return peak_live_bytes, which begins anew with what is alive now. */
PyObject *gck_restart_peak_py(PyObject *module, PyObject *unused);

#endif
