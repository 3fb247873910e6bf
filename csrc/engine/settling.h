/* settling.h: in which form a saved tensor is kept, once the node that saves it is known. */
#ifndef GRADCKPT_SETTLING_H
#define GRADCKPT_SETTLING_H

#include "waiting.h"

/* A pair of hooks: heap type Saver, see saver.c. */
typedef struct {
    PyObject_HEAD
    gck_packing packing;
    PyObject   *waiting;                         /* see waiting.h; NULL: nothing is lost */
    PyObject   *outer_pack, *outer_unpack;       /* hooks around ours, or NULL           */
} gck_saver;

/* The tensor in the form that gradckpt._savers gave, counted.  Where it gave None, where the codec cannot hold the
 * values, and where form is NULL: by reference, for this reason.  GCK_COMPRESS: nobody else may need it exactly.  0 or -1. */
int gck_settling_put(const gck_saver *self, PyObject *form, gck_input *in, gck_form *to, int reason);

/* Where this is a tensor that stays as it is: so does what shares its storage.  0 or -1. */
int gck_settling_hold(const gck_saver *self, const gck_form *form);

/* One that waits becomes what its node needs; node NULL: not known, it stays, without its graph, of which it may be a
 * result; go_on: and waits again.  0 or -1. */
int gck_settling_settle(gck_saved *saved, PyObject *node, int go_on);

#endif
