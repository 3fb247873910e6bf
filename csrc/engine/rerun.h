/* rerun.h: what surrounds a function while it runs again in backward, in either form of
 * checkpointing: ambient state and grad mode of the forward, running statistics. */
#ifndef GRADCKPT_RERUN_H
#define GRADCKPT_RERUN_H

#include "frame.h"

typedef struct {
    gck_surroundings surroundings;
    PyObject        *buffers;      /* guard of gradckpt.buffers; NULL: nothing to put back */
    PyObject        *dynamo;       /* likewise, for gck_dynamo_restore */
    bool             grad;
} gck_rerun;

/* 0, or -1 with an exception; then nothing is changed. */
int gck_rerun_begin(gck_frame *frame, gck_rerun *r);

/* Put everything back, also with an exception pending: that one survives.  0 or -1. */
int gck_rerun_end(gck_frame *frame, gck_rerun *r);

/* gradckpt.policies.is_recomputing(). */
PyObject *gck_is_recomputing(PyObject *module, PyObject *unused);

/* gradckpt._C.forget_types(): gradckpt.buffers has other rules. */
PyObject *gck_forget_types(PyObject *module, PyObject *unused);

#endif
