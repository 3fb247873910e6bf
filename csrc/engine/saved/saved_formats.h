/* saved_formats.h: the codecs that users give to operators, to nodes, and to what a node saves. */
#ifndef GRADCKPT_SAVED_FORMATS_H
#define GRADCKPT_SAVED_FORMATS_H

#include "torch/input.h"
#include "engine/saved/saved_row.h"
#include "engine/saved/saved_tensor.h"

/* The codec of each family; NULL: exact.  rules: owned, NULL: none; codecs' names or None by the name of a node, or by
 * that, a point and an argument. */
typedef struct { const gck_codec *of[GCK_NFAMILIES]; PyObject *rules; } gck_saved_formats;

/* The form of one tensor.  All zero: it stays exact. */
typedef struct {
    const gck_codec *codec;
    PyObject        *part;         /* owned: what is encoded in its place; NULL: itself    */
    PyObject        *rows;         /* owned: the dimension along which restored values have the sum 1; or NULL */
    PyObject        *again;        /* owned: the function that makes it; NULL: it is kept     */
    int              unknown;      /* a Function saves it of which nothing is known        */
} gck_saved_as;

void gck_saved_as_clear(gck_saved_as *as);

/* One codec for all families but the softmaxes, which have formats of their own. */
gck_saved_formats gck_saved_formats_of(const gck_codec *codec);

/* Give families and nodes codecs of their own: a tuple of (name, codec or None).  0 or -1. */
int gck_saved_formats_read(PyObject *pairs, gck_saved_formats *formats);

/* Of what the node saves as this argument: 1 when a rule for it gives *codec, NULL for none; 2: one for all that the
 * node saves; 0; -1. */
int gck_saved_rule(const gck_saved_formats *formats, PyObject *node, const char *argument, const gck_codec **codec);

/* The form of what a Function that no table has saves, by such a rule.  0 or -1. */
int gck_saved_rule_of_function(gck_state *state, const gck_saved_formats *formats, PyObject *node,
                               const gck_saved_tensor *packed, gck_input *in, gck_saved_as *as);

#endif
