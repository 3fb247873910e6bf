/* recompute_env.h: what surrounds a function while it runs again in backward, in either form of
 * checkpointing: ambient state and grad mode of the forward, running statistics. */
#ifndef GRADCKPT_RECOMPUTE_ENV_H
#define GRADCKPT_RECOMPUTE_ENV_H

#include "torch/ambient.h"
#include "engine/region/frame.h"

typedef struct {
    gck_surroundings surroundings;
    PyObject        *buffers;      /* guard of gradckpt._engine.buffers; NULL: nothing to restore */
    PyObject        *dynamo;       /* owned or NULL, for gck_dynamo_restore */
    bool             grad;
} gck_recompute_env;

/* 0, or -1 with an exception; then nothing is changed. */
int gck_recompute_env_begin(gck_frame *frame, gck_recompute_env *r);

/* Restore everything, also with an exception pending, which survives.  0 or -1. */
int gck_recompute_env_end(gck_frame *frame, gck_recompute_env *r);

/* gradckpt.policies.is_recomputing(). */
PyObject *gck_is_recomputing(PyObject *module, PyObject *unused);

/* gradckpt._C.forget_types(): the rules of gradckpt._engine.buffers have changed. */
PyObject *gck_forget_types(PyObject *module, PyObject *unused);

#endif
