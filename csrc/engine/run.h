/* run.h: what one run of a region's function knows while it runs: its arguments, and how far it is. */
#ifndef GRADCKPT_RUN_H
#define GRADCKPT_RUN_H

#include "torch/input.h"
#include "torch/objects.h"

enum { GCK_GIVEN = 16 };           /* tensors of a call that are known; others have no number */

typedef struct {
    const Py_ssize_t *saved;       /* borrowed: how many tensors it has saved; NULL: not counted */
    /* The tensors among the arguments, also in tuples, in the order of the call: compared, never
     * followed.  The tuple and the dict of the call own them while it runs. */
    PyObject *given[GCK_GIVEN];
    int       n;
    PyObject *const *originals;    /* borrowed, of a recompute: weak references to the forward's; NULL */
    uint64_t  layouts;             /* a hash of how they are laid out                        */
    int       laid_anew;           /* not as in the forward: saved-tensor hooks around the region did that */
} gck_run;

/* Of a forward; what a recompute knows beside is left empty.  0 or -1. */
int gck_run_of(const gck_py *py, gck_run *run, const Py_ssize_t *saved, PyObject *args, PyObject *kwargs);

/* Borrowed: argument i, or in a recompute that of the forward, which the function may have from elsewhere,
 * too; NULL: it is gone. */
PyObject *gck_given(const gck_run *run, int i, int original);

/* Which arguments x is, as bits.  run NULL: nothing is known. */
uint32_t gck_arguments_that_are(const gck_run *run, const PyObject *x);

/* Hash another value, and the strides that mean something. */
uint64_t gck_mix(uint64_t hash, uint64_t value);
uint64_t gck_mix_strides(uint64_t hash, const gck_dl_tensor *x);

#endif
