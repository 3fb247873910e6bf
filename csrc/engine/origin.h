/* origin.h: what a saved tensor is, as the autograd graph tells it. */
#ifndef GRADCKPT_ORIGIN_H
#define GRADCKPT_ORIGIN_H

#include "state.h"

typedef enum {
    GCK_ORIGIN_VALUES,       /* an activation                                                  */
    GCK_ORIGIN_LEAF,         /* a leaf seen through views or casts: stays alive anyway         */
    GCK_ORIGIN_STATISTIC,    /* small, and its error would be that of every value beside it    */
    GCK_ORIGIN_LOG,          /* backward takes its exponential: absolute errors become relative */
    GCK_ORIGIN_SIGNS,        /* being saved by the ReLU that made it: only x > 0 is read       */
    GCK_ORIGIN_COMPARED,     /* being saved by a reduction whose backward compares its input
                              * with it: both exact                                            */
} gck_origin;

/* x requires grad and is no leaf.  A gck_origin, or -1 with an exception. */
int gck_origin_of(PyObject *x);

/* x comes out of a node that is saving it right now: new reference to what the node saved
 * under `name` before, as the pack hook gave it; NULL without an exception when it did not. */
PyObject *gck_origin_saved(PyObject *x, const char *name);

#endif
