/* run.h: what one run of a region's function knows while it runs: its arguments, and how far it is. */
#ifndef GRADCKPT_RUN_H
#define GRADCKPT_RUN_H

#include "torch/objects.h"

enum { GCK_GIVEN = 16 };           /* tensors of a call that are known; others have no number */

typedef struct {
    const Py_ssize_t *saved;       /* borrowed: how many tensors it has saved; NULL: not counted */
    /* The tensors among the arguments, also in tuples, in the order of the call: compared, never
     * followed.  The tuple and the dict of the call own them while it runs. */
    PyObject *given[GCK_GIVEN];
    int       n;
} gck_run;

void gck_run_of(gck_run *run, const Py_ssize_t *saved, PyObject *args, PyObject *kwargs);

enum { GCK_NO_ARGUMENT = -1, GCK_SOME_ARGUMENT = -2 };   /* SOME: it was given twice */

/* The number of the argument that x is, or one of those above.  run NULL: nothing is known. */
int gck_argument_number(const gck_run *run, const PyObject *x);

#endif
