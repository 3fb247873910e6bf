/* origin.h: where a saved tensor comes from, as far as a run of the region knows it.
 *
 * The recompute has to save the tensors of the forward, one by one.  Shapes do not tell two tensors of
 * one shape apart; these facts do.  What one of the runs does not know never counts as a difference:
 * parameters may be gathered anew or replaced, and a value that the forward computed may be cached when
 * the recompute asks for it.  An address is no fact, since memory is used again. */
#ifndef GRADCKPT_ORIGIN_H
#define GRADCKPT_ORIGIN_H

#include "engine/run.h"

typedef struct {
    int       argument;      /* the number of the argument that it is, or GCK_NO_ARGUMENT, GCK_SOME_ARGUMENT */
    PyObject *node;          /* owned: the type of the node that made it; NULL: not known, or an argument
                                itself and no view of it                                       */
    PyObject *leaf;          /* owned: weak reference to the argument or the tensor without a node that it
                                is, or to the parameter of which it is a view; NULL: none of these  */
    int64_t   offset;        /* of such a view, in bytes                                            */
    int       constant;      /* no node made it, and no gradient flows to it                        */
} gck_origin;

/* Read it of a tensor that autograd saves.  *grad: whether it requires grad.  0, or -1 with an exception
 * and *origin empty. */
int gck_origin_of(const gck_py *py, const gck_run *run, PyObject *x, gck_origin *origin, int *grad);

/* 0 when both are known and differ, else 1; -1.  A leaf that requires grad may have been replaced by a
 * result, and of two leaves one pair says nothing. */
int gck_origin_same(const gck_origin *then, const gck_origin *now);

/* 1 when x is the argument itself that the forward saved, or a view of all of it: the function has that
 * from elsewhere, too; 0; -1.  No Python runs. */
int gck_origin_is_original(const gck_py *py, const gck_origin *then, PyObject *x);

/* Borrowed: the tensor that it is, or lies in, if that is alive; NULL. */
PyObject *gck_origin_leaf(const gck_origin *origin);

/* New reference: (argument, name of the node or None, leaf or None), for messages. */
PyObject *gck_origin_describe(const gck_origin *origin);

void gck_origin_clear(gck_origin *origin);

#endif
