/* saved_form.h: the form in which a saved tensor is kept, once the node that saves it is known. */
#ifndef GRADCKPT_SAVED_FORM_H
#define GRADCKPT_SAVED_FORM_H

#include "torch/input.h"
#include "engine/payload/packed.h"
#include "engine/saved/saved_tensor.h"

/* A pair of hooks: heap type SavedHooks, see saved_hooks.c. */
typedef struct {
    PyObject_HEAD
    gck_packing packing;
    PyObject   *waiting;                         /* see saved_waiting.h; NULL: the codec is lossless */
    PyObject   *outer_pack, *outer_unpack;       /* hooks around ours, or NULL           */
    int64_t     number, last;                    /* the node being made, and the last of those that packing made
                                                  * meanwhile (outer hooks, torch without _make_saved_tensor) */
} gck_saved_hooks;

/* Keep the tensor in the form that gradckpt._engine.saved_roles returned, and count it.  It is kept
 * by reference, for this reason, where that returned None, where the codec overflows, and where
 * form is NULL. GCK_COMPRESS: no other node needs it exactly.  0 or -1. */
int gck_saved_form_put(const gck_saved_hooks *self, PyObject *form, gck_input *in, gck_saved_form *to, int reason);

/* Keep `saved` in this form from now on.  0 or -1. */
int gck_saved_form_become(const gck_saved_hooks *self, gck_saved_tensor *saved, PyObject *form, gck_input *in,
                          int reason);

/* If this tensor stays uncompressed, keep everything that shares its storage uncompressed too.  0
 * or -1. */
int gck_saved_form_hold(const gck_saved_hooks *self, const gck_saved_form *form);

#endif
