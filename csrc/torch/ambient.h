/* ambient.h: the state around a call that its recompute must restore: random number generators,
 * autocast, default device, torch.fx's flag.  (The engine sets grad mode, which is always on.) */
#ifndef GRADCKPT_AMBIENT_H
#define GRADCKPT_AMBIENT_H

#include "torch/autocast.h"
#include "torch/objects.h"

/* Captured at forward time.  Everything owned; NULL means "nothing to do". */
typedef struct {
    PyObject *cpu_rng;      /* state of the CPU generator: a copy, not a handle       */
    PyObject *device_rng;   /* see generators.h                                       */
    int       exact;        /* as torch: states are also given to captured graphs     */
    gck_autocast autocast;
    PyObject *device;       /* innermost torch.device context                         */
    int       fx;           /* torch.fx traced symbolically; 0 where torch has no flag */
} gck_ambient;

/* The state around the recompute, to be restored after it. */
typedef struct {
    PyObject *cpu_rng;
    PyObject *device_rng;
    PyObject *leave;        /* [(builtin, args), ...]: autocast and device as before  */
    PyObject *modes;        /* the torch function modes as before                     */
    int       fx;           /* what torch.fx's flag was; -1: as it is                 */
} gck_surroundings;

/* Capture the state in *a, which is empty.  0, or -1 with an exception; the references in *a are the caller's, also
 * then.  args: tuple, kwargs: dict or NULL: where to search for the devices in use.  exact: as torch searches, one
 * device type among the positional arguments, with its warning. */
int gck_ambient_capture(gck_py *py, gck_ambient *a, int preserve_rng, int exact, PyObject *args, PyObject *kwargs);

/* Set the captured state; *s takes the previous one.  On -1 nothing is changed. with_device 0: the
 * caller's context enters the default device, and it is restored here. */
int gck_ambient_enter(gck_py *py, const gck_ambient *a, int with_device, gck_surroundings *s);

/* Restore *s, also with an exception pending, which survives unless restoring fails and none was
 * pending.  0 or -1. */
int gck_ambient_leave(gck_py *py, gck_surroundings *s);


/* ---- torch.compile ---- */

/* Where a graph breaks at a region, its function is called from code that is being compiled, and
 * run again by a backward that may not be.  Dynamo's version would save other tensors than the
 * recompute.  So no frame below is compiled in either run, as in torch; torch.compile objects
 * inside still are.  *before: NULL, or owned, for gck_dynamo_restore.  0 or -1. */
int gck_dynamo_off(const gck_py *py, PyObject **before);

/* Restore the hook, also with an exception pending, which survives. */
void gck_dynamo_restore(const gck_py *py, PyObject *before);

#endif
