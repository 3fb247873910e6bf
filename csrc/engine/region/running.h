/* running.h: the regions that run in each thread, for calls inside them that do not run again. */
#ifndef GRADCKPT_RUNNING_H
#define GRADCKPT_RUNNING_H

#include "engine/selective/active_storage.h"
#include "engine/region/frame.h"

/* Saved-tensor hooks that are active while a region's function runs. */
typedef struct {
    PyObject    *pack;             /* borrowed: a frame or a recompute, which is its own pack hook */
    PyMethodDef *unpack;           /* bound to it                                          */
    const Py_ssize_t *saved;       /* borrowed: how many tensors they have packed          */
    const gck_run **run;           /* borrowed: where they find the run while it lasts     */
} gck_hooks;

/* One region that runs in this thread; it lies on the C stack of the region's call. */
typedef struct gck_running {
    gck_frame          *frame;     /* borrowed                                             */
    const gck_hooks    *hooks;     /* NULL: the region is one node                         */
    int                 replay;
    const gck_active   *around;    /* the innermost store of this thread outside the region; NULL: none */
    struct gck_running *outer;
    PyObject           *ended;     /* owned list, of the outermost region: frames of regions inside that have
                                    * ended, and the originals of their arguments; NULL: none */
} gck_running;

/* A backward inside a forward reads what that forward has, not what payloads give: until the outermost
 * region of this thread has ended, the frames of regions inside restore their originals and replay nothing.
 * 0 or -1; a pending exception survives leaving. */
int gck_running_enter(gck_running *r, gck_frame *frame, const gck_hooks *hooks, int replay);
void gck_running_leave(gck_running *r);

/* 1 when the recompute may get other values than the forward: restored inputs, or outputs that its policy
 * keeps. */
int gck_is_approximate(const gck_frame *frame);

/* gradckpt._C.running_region(). */
PyObject *gck_running_region(PyObject *module, PyObject *unused);

/* gradckpt._C.hooks_around_region(). */
PyObject *gck_hooks_around_region(PyObject *module, PyObject *unused);

/* gradckpt._C.hide_operators(by), is_name_wanted(match). */
PyObject *gck_hide_operators(PyObject *module, PyObject *by);
PyObject *gck_is_name_wanted(PyObject *module, PyObject *match);

/* gradckpt._C.cpu_rng_state(), set_cpu_rng_state(state): the same object until something is drawn. */
PyObject *gck_cpu_rng_state(PyObject *module, PyObject *unused);
PyObject *gck_set_cpu_rng_state(PyObject *module, PyObject *rng_state);

#endif
