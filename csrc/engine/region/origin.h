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
    uint32_t  arguments;     /* bits: which arguments it is, or has the memory and the layout of      */
    int       itself;        /* it is an argument, and no view of one                                 */
    PyObject *node;          /* owned: the type of the node that made it; NULL: not known, or itself  */
    PyObject *through;       /* owned: of a view of all of its base: likewise of the base; NULL       */
    PyObject *leaf;          /* owned: weak reference to the argument or the tensor without a node that it
                                is, or of which it is a view; NULL: none of these                     */
    int64_t   offset;        /* of such a view, in bytes; -1: not known                               */
    int       constant;      /* no node made it, and no gradient flows to it                          */
    int       looked;        /* at its node                                                           */
    int64_t   version;       /* of a constant                                                         */
} gck_origin;

/* Nodes of live regions that are looked at, at most.  Torch keeps an object for each, and frees a chain of
 * them by recursion, 200 bytes of stack a node; others it frees in a loop. */
enum { GCK_NODES = 1000 };

/* Read it of a tensor that autograd saves.  look: also at its node.  *grad: whether it requires grad.
 * 0, or -1 with an exception and *origin empty. */
int gck_origin_of(const gck_py *py, const gck_run *run, int look, PyObject *x, gck_origin *origin, int *grad);

/* 0 when both are known and differ, else 1; -1.  Where memory lies tells that two are the same, never
 * that they differ: a forward's arguments and closures may be views of one another, those of a recompute
 * are not. */
int gck_origin_same(const gck_origin *then, const gck_origin *now);

/* Borrowed: the tensor that it is, or lies in, if that is alive; NULL. */
PyObject *gck_origin_leaf(const gck_origin *origin);

/* New reference: (argument, name of the node or None, leaf or None), for messages. */
PyObject *gck_origin_describe(const gck_origin *origin);

void gck_origin_clear(gck_origin *origin);

#endif
