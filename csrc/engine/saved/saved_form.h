/* saved_form.h: the form in which a saved tensor is kept, once the node that saves it is known. */
#ifndef GRADCKPT_SAVED_FORM_H
#define GRADCKPT_SAVED_FORM_H

#include "torch/input.h"
#include "engine/payload/packed.h"
#include "engine/saved/saved_role.h"
#include "engine/saved/saved_tensor.h"

/* A pair of hooks: heap type SavedHooks, see saved_hooks.c. */
typedef struct {
    PyObject_HEAD
    gck_packing packing;                         /* the place of its plan is owned       */
    gck_saved_formats formats;
    int         waits;                           /* what a tensor needs depends on the node that saves it */
    PyObject   *waiting;                         /* see saved_waiting.h; NULL: the codec is lossless */
    PyObject   *outer_pack, *outer_unpack;       /* hooks around ours, or NULL           */
    int64_t     number, last;                    /* the node being made, and the last of those that packing made
                                                  * meanwhile (outer hooks, torch without _make_saved_tensor) */
    PyObject   *by_thread;                       /* of a pair that any thread may use: dict, id of a thread ->
                                                  * its SavedHooks; else NULL                */
} gck_saved_hooks;

/* Keep the tensor in this form, and count it.  It is kept by reference, for this reason, where the
 * form is exact and where the codec overflows.  GCK_COMPRESS: no other node needs it exactly.
 * batch: where encoding may be deferred, or NULL.  0 or -1. */
int gck_saved_form_store(const gck_saved_hooks *self, const gck_saved_as *as, gck_input *in, gck_saved_form *to,
                         int reason, gck_batch *batch);

/* Keep `saved` in this form from now on.  0 or -1. */
int gck_saved_form_become(const gck_saved_hooks *self, gck_saved_tensor *saved, const gck_saved_as *as, gck_input *in,
                          int reason, gck_batch *batch);

/* Return from a payload to the tensor itself, if it still exists unchanged and no other hooks have seen the payload.
 * 0 or -1. */
int gck_saved_form_take_back(const gck_saved_hooks *self, gck_saved_tensor *of);

/* If this tensor stays uncompressed, keep everything that shares its storage uncompressed too.  0
 * or -1. */
int gck_saved_form_hold(const gck_saved_hooks *self, const gck_saved_form *form);

#endif
