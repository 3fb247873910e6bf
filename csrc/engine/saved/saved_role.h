/* saved_role.h: the form that suffices for the node which saves a tensor. */
#ifndef GRADCKPT_SAVED_ROLE_H
#define GRADCKPT_SAVED_ROLE_H

#include "torch/input.h"
#include "engine/saved/saved_node.h"
#include "engine/saved/saved_tensor.h"

/* The codec of each family; NULL: exact. */
typedef struct { const gck_codec *of[GCK_NFAMILIES]; } gck_saved_formats;

/* The form of one tensor.  All zero: it stays exact. */
typedef struct {
    const gck_codec *codec;
    PyObject        *part;         /* owned: what is encoded in its place; NULL: itself    */
    PyObject        *rows;         /* owned: the dimension along which restored values have the sum 1; or NULL */
    PyObject        *again;        /* owned: the function that makes it; NULL: it is kept     */
} gck_saved_as;

void gck_saved_as_clear(gck_saved_as *as);

/* One codec for all families but the softmaxes, which have formats of their own. */
gck_saved_formats gck_saved_formats_of(const gck_codec *codec);

/* The form of an input of the node, for which a pack hook returned `packed`.  Exact, where the table
 * has no row that matches.  0 or -1. */
int gck_saved_as_input(gck_state *state, const gck_saved_formats *formats, PyObject *node, PyObject *packed,
                       gck_input *in, gck_saved_as *as);

/* The form of the node's own result, which it is about to save.  0 or -1. */
int gck_saved_as_result(gck_state *state, const gck_saved_formats *formats, PyObject *node, gck_input *in,
                        gck_saved_as *as);

/* The number of values of the node's result with this index; -1 with an exception. */
int64_t gck_node_numel(const gck_py *py, PyObject *node, Py_ssize_t result);

/* 1 when *exponent is the node's; 0: it is complex; -1. */
int gck_node_exponent(const gck_py *py, PyObject *node, double *exponent);

/* New reference: what a pack hook of ours returned for this argument, also within what other hooks made of it; NULL:
 * nothing, or an exception. */
gck_saved_tensor *gck_node_saved(const gck_state *state, PyObject *node, PyObject *attribute);

/* Whether x, whose history is `node`, lies in the memory of a leaf, seen through views and casts: 1,
 * 0, -1. */
int gck_lies_in_leaf(gck_state *state, PyObject *x, PyObject *node);

/* Give families codecs of their own: a sequence of (name, codec or None).  0 or -1. */
int gck_saved_formats_read(PyObject *pairs, gck_saved_formats *formats);

#endif
