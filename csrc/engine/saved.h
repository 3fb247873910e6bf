/* saved.h: one tensor as compress_saved() keeps it between forward and backward. */
#ifndef GRADCKPT_SAVED_H
#define GRADCKPT_SAVED_H

#include "entry.h"

extern PyType_Spec gck_saved_spec;

/* What is kept of a tensor x. */
typedef struct {
    gck_entry  entry;        /* a payload, or the tensor itself                          */
    PyObject  *dtype;        /* of x, when the payload is of something made of it; else NULL */
    PyObject  *view;         /* x is this as_strided() of what the payload gives; else NULL */
    const void *storage;     /* of x: compared while somebody holds x, never followed; NULL: nobody asks */
} gck_form;

typedef struct {
    PyObject_HEAD
    gck_state *state;
    gck_form   form;
    /* See waiting.h. */
    PyObject  *waiting;      /* the list that knows it; else NULL                        */
    PyObject  *saver;        /* while it waits: the hooks that packed it                 */
    int64_t    number;       /* of the node that saves it                                */
    int64_t    waits, epoch; /* bytes, while it waits, and when they were counted        */
} gck_saved;

/* New reference: empty. */
gck_saved *gck_saved_new(gck_state *state);

void gck_form_clear(gck_form *form);

/* New reference: the view of `whole` that x is of what its payload gives. */
PyObject *gck_form_view(const gck_form *form, PyObject *whole);

/* New reference: the tensor, without history, which autograd has itself. */
PyObject *gck_saved_restore(const gck_saved *self);

#endif
