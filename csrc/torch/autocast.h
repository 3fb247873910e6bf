/* autocast.h: autocast as it was in the forward, set by calls of builtins: no Python code runs. */
#ifndef GRADCKPT_AUTOCAST_H
#define GRADCKPT_AUTOCAST_H

#include "torch/objects.h"

typedef struct {
    PyObject *types;        /* [(device type, enabled, dtype), ...] of each type where it was on, of the CPU and the
                             * accelerator;
                             * NULL: it was off everywhere                            */
    PyObject *cpu_dtype;    /* on the CPU, also while it is disabled                  */
    PyObject *device_dtype; /* the same of the accelerator; NULL: there is none       */
    int       cache;        /* the cache flag, also while it is disabled              */
} gck_autocast;

/* 0, or -1 with an exception; the references in *a are the caller's, also then. */
int gck_autocast_capture(const gck_py *py, gck_autocast *a);

/* 1 when it differs from now; 0; -1. */
int gck_autocast_differs(const gck_py *py, const gck_autocast *a);

/* Append the calls, as tuples of (builtin, arguments), that set it as it was, and those that set it as it is now.
 * 0 or -1. */
int gck_autocast_plan(const gck_py *py, const gck_autocast *a, PyObject *enter, PyObject *leave);

#endif
