/* saved.h: one tensor as compress_saved() keeps it between forward and backward. */
#ifndef GRADCKPT_SAVED_H
#define GRADCKPT_SAVED_H

#include "entry.h"
#include "role.h"

extern PyType_Spec gck_saved_spec;

typedef struct {
    PyObject_HEAD
    gck_state *state;
    gck_entry  entry;        /* a payload, or the tensor itself                          */
    gck_role   role;         /* how the payload is to be read                            */
    PyObject  *dtype;        /* of x, when the payload is a mask; else NULL              */
    int        ndim;         /* >= 0: x is a view of what the payload gives:             */
    int64_t    offset;       /* in values                                                */
    int64_t   *geometry;     /* ndim sizes, ndim strides; malloc                         */
    /* See waiting.h. */
    PyObject  *waiting;      /* the list in which it waits or is remembered; else NULL   */
    PyObject  *saver;        /* while it waits: the hooks that packed it                 */
    PyObject  *node;         /* that saves it, between finding and settling              */
    int64_t    number;       /* of that node                                             */
    int64_t    numel, widest;  /* values in memory: of x; most of all that the node saves */
    int64_t    nbytes, waits;  /* of x, where counted as kept; where as alive            */
    int64_t    epoch;        /* of that count                                            */
    const void *storage;     /* of x: compared while somebody holds x, never followed    */
} gck_saved;

/* What is kept, and how it is read, changes places. */
void gck_saved_swap(gck_saved *a, gck_saved *b);

/* New reference: empty, no view. */
gck_saved *gck_saved_new(gck_state *state);

/* x, of this view, begins `offset` values into what is kept.  0 or -1. */
int gck_saved_describe(gck_saved *self, const gck_tensor *x, int64_t offset);

/* New reference: the described view of `whole`. */
PyObject *gck_saved_view(const gck_saved *self, PyObject *whole);

/* New reference: the tensor, without history, which autograd has itself. */
PyObject *gck_saved_restore(const gck_saved *self);

#endif
