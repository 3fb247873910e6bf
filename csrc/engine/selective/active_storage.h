/* active_storage.h: the storages that catch operators in each thread, in a list of the state. */
#ifndef GRADCKPT_ACTIVE_STORAGE_H
#define GRADCKPT_ACTIVE_STORAGE_H

#include "engine/state.h"
#include "engine/selective/op_storage.h"

/* One active store of one thread.  It lies on the C stack of the region, or on the heap for
 * contexts that Python enters. */
typedef struct gck_active {
    gck_op_storage    *store;        /* owned                                            */
    int                replay;
    unsigned long      thread;
    int                by_key;       /* else a mode catches, and this entry only records that */
    int                busy;         /* its operator runs: nothing below is seen         */
    int                hidden;       /* a call runs that the recompute does not repeat: nothing is seen */
    int                decides;      /* the store keeps discrete outputs, so torch's checkpoint must too */
    PyObject          *context;      /* the context that Python entered, borrowed; else NULL */
    int64_t           *next;         /* replay: the next call of each line; malloc       */
    /* replay for a policy that is a function: defaultdict: key of an operator -> count; owned */
    PyObject          *counts;
    struct gck_active *outer;        /* in the state's list: inner ones first            */
} gck_active;

/* Borrowed: `a` or the next one around it that sees this thread's operators; NULL: none. */
gck_active *gck_active_here(gck_active *a, unsigned long thread);

/* Borrowed: the active store that this thread entered with that context; NULL: none. */
gck_active *gck_active_of(gck_state *state, const PyObject *context);

#endif
