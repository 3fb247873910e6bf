/* saved.h: one tensor as compress_saved() keeps it between forward and backward. */
#ifndef GRADCKPT_SAVED_H
#define GRADCKPT_SAVED_H

#include "entry.h"

extern PyType_Spec gck_saved_spec;

typedef struct {
    PyObject_HEAD
    gck_state *state;
    gck_entry  entry;        /* a payload, or the tensor itself                          */
    PyObject  *dtype;        /* not NULL: the payload is the mask of x <= 0, x was such  */
    int        ndim;         /* >= 0: x is a view of what the payload gives:             */
    int64_t    offset;       /* in values                                                */
    int64_t   *geometry;     /* ndim sizes, ndim strides; malloc                         */
} gck_saved;

/* New reference: empty, no view. */
gck_saved *gck_saved_new(gck_state *state);

/* x, of this view, begins `offset` values into what is kept.  0 or -1. */
int gck_saved_describe(gck_saved *self, const gck_tensor *x, int64_t offset);

/* New reference: the described view of `whole`. */
PyObject *gck_saved_view(const gck_saved *self, PyObject *whole);

/* New reference: the tensor, without history, which autograd has itself. */
PyObject *gck_saved_restore(const gck_saved *self);

#endif
