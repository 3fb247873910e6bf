/* recomputed.h: the recomputed tensors of a frame, one table per backward. */
#ifndef GRADCKPT_RECOMPUTED_H
#define GRADCKPT_RECOMPUTED_H

#include "torch/objects.h"
#include "engine/state.h"

/* A value without a version; one that was changed in place after it was packed. */
typedef enum { GCK_NO_VERSION = -1, GCK_OVERWRITTEN = -2 } gck_packed_version;
typedef enum { GCK_RESTORING = 1, GCK_FILLED, GCK_DRAINED } gck_recomputed_phase;

/* The recomputed tensors of one backward: of one graph task, GraphExecGroup, or access
 * from outside any backward. */
typedef struct {
    int64_t         task;          /* graph task id, or < -1: outside                    */
    PyObject       *group;         /* owned GraphExecGroup; then task does not count     */
    gck_recomputed_phase phase;
    int             watched;       /* freed at the end of its graph task                 */
    unsigned long   thread;        /* the recomputing thread, while RESTORING            */
    PyObject       *gate;          /* a lock, held until the recompute is over; NULL: no thread waits */
    Py_ssize_t      counter;       /* tensors packed by the recompute so far             */
    Py_ssize_t      left;          /* values not handed out yet                          */
    Py_ssize_t      size;          /* slots when the table was made: a region may record more */
    /* `size`: the value, NULL: absent or handed out; its version when it was packed, or a gck_packed_version; malloc */
    struct { PyObject *value; int64_t version; int handed; } *slots;
} gck_recomputed;

/* The tables of one frame. */
typedef struct gck_recomputed_tables {
    gck_state       *state;                   /* borrowed, as the frame's                           */
    gck_recomputed **table;                   /* n; malloc                                          */
    Py_ssize_t       n;
    struct gck_recomputed_tables *next;       /* borrowed: in the state's list while there are tables */
} gck_recomputed_tables;

/* Borrowed; NULL when there is none for this key. */
gck_recomputed *gck_recomputed_find(gck_recomputed_tables *tables, int64_t task, PyObject *group);
/* Borrowed: a new table for `size` values; NULL with an exception. */
gck_recomputed *gck_recomputed_new(gck_recomputed_tables *tables, Py_ssize_t size, int64_t task, PyObject *group);
void gck_recomputed_free(gck_recomputed_tables *tables, gck_recomputed *table);
void gck_recomputed_clear(gck_recomputed_tables *tables);
/* The recompute is over: threads that wait for it continue. */
void gck_recomputed_open(gck_recomputed *table);
/* Wait for the recomputing thread, with the GIL released.  0, or -1 when a signal handler
 * raised. */
int gck_recomputed_wait(const gck_py *py, gck_recomputed *table);
/* Free the values; which slots were handed out stays known. */
void gck_recomputed_drain(gck_recomputed *table);

#endif
