/* settling.h: in which form a saved tensor is kept, once the node that saves it is known. */
#ifndef GRADCKPT_SETTLING_H
#define GRADCKPT_SETTLING_H

#include "role.h"
#include "waiting.h"

/* A pair of hooks: heap type Saver, see saver.c. */
typedef struct {
    PyObject_HEAD
    gck_packing packing;
    PyObject   *waiting;                         /* see waiting.h; NULL: nothing is lost */
    PyObject   *outer_pack, *outer_unpack;       /* hooks around ours, or NULL           */
} gck_saver;
/* By reference, checked against its version at unpack.  0 or -1. */
int gck_settling_keep(const gck_saver *self, gck_input *in, gck_saved *to);

/* The tensor in the form that the role asks for.  1; 0: it has to stay as it is, for the reason *verdict; -1. */
int gck_settling_encode(const gck_saver *self, gck_role role, gck_input *in, gck_saved *to, int *verdict);

/* Decided: `to` is remembered.  0 or -1. */
int gck_settling_remember(const gck_saver *self, gck_saved *to);

/* A tensor of this storage stays as it is: so does what shares it.  0 or -1. */
int gck_settling_hold(const gck_saver *self, const void *storage);

/* See waiting.h: the tensor becomes what its node needs, or stays. */
int gck_settling_settle(gck_saved *saved, PyObject *node);

#endif
