/* call_matching.h: which call of the forward a call of the recompute is. */
#ifndef GRADCKPT_CALL_MATCHING_H
#define GRADCKPT_CALL_MATCHING_H

#include "engine/selective/op_storage.h"

/* How much two calls of one kind have in common. */
typedef enum {
    GCK_LIKE_CALLS,              /* other floating constants                                    */
    GCK_LIKE_CONSTANTS,          /* equal ones                                                  */
    GCK_LIKE_ARGUMENTS,          /* and operands that are the same arguments of the region      */
} gck_likeness;

/* Two facts at one index: about the call of the forward, and about the recompute's call with that
 * number. */
typedef struct {
    int        used;             /* forward: a call matched it                                  */
    PyObject  *given;            /* forward: what was handed out and left the store; owned, NULL */
    Py_ssize_t of;               /* recompute: the call of the forward that it is               */
    gck_likeness likeness;       /* recompute: of the two                                       */
    Py_ssize_t rival;            /* recompute: another, of the same arguments; GCK_NO_MATCH     */
} gck_match;

/* The calls that one recompute has made.  Here and not in the store: two threads may recompute one
 * region at once. */
typedef struct {
    gck_match *matches;          /* n; malloc                                                   */
    Py_ssize_t n;                /* calls of the forward when the recompute began               */
    Py_ssize_t made;             /* calls of the recompute that are among them                  */
    Py_ssize_t next;             /* after the last of the forward's that was matched            */
    int        stamped;          /* stamps of both runs count                                   */
    int        laid_anew;        /* strides do not                                              */
    int        disordered;       /* the recompute called them in another order                  */
    int        rivals;           /* how many have one                                           */
    PyObject  *surplus;          /* the operator of a call more than the forward made; owned, NULL */
    Py_ssize_t often;            /* how often the forward made that call                        */
} gck_matching;

/* run: of the recompute, or NULL: not known.  0 or -1. */
int  gck_matching_begin(gck_matching *m, const gck_op_storage *store, const gck_run *run);
void gck_matching_end(gck_matching *m);

/* The first call of the forward, in order, that this one can be; GCK_NO_MATCH: the forward made no
 * such call, so it runs; -1 with an exception: it made fewer of them, and kept one. */
enum { GCK_NO_MATCH = -2 };
Py_ssize_t gck_matching_find(gck_matching *m, gck_op_storage *store, const gck_call *call);

/* The entry of that call leaves the store.  It stays known where the judgement may need it. */
void gck_matching_consume(gck_matching *m, gck_op_storage *store, Py_ssize_t index);

/* The recompute is over; stopped: before its function ended.  -1 with a CheckpointError when calls
 * were more than the forward's, or when they can be calls of the forward in two ways that return
 * different values; else 0. */
int gck_matching_compare(const gck_matching *m, gck_op_storage *store, int stopped);

#endif
