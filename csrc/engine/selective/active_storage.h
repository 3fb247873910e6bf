/* active_storage.h: the storages that catch operators in each thread, in a list of the state. */
#ifndef GRADCKPT_ACTIVE_STORAGE_H
#define GRADCKPT_ACTIVE_STORAGE_H

#include "engine/run.h"
#include "engine/state.h"
#include "engine/selective/call_matching.h"
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
    const gck_run     *run;          /* of its region, borrowed; NULL: not known        */
    gck_matching       matching;     /* replay                                           */
    /* replay of what torch's mode kept for a trace: defaultdict: key of an operator -> count; owned */
    PyObject          *counts;
    struct gck_active *outer;        /* in the state's list: inner ones first            */
} gck_active;

/* Borrowed: `a` or the next one around it of this thread; NULL: none. */
gck_active *gck_active_of_thread(gck_active *a);

/* Borrowed: `a` or the next one around it that sees this thread's operators; NULL: none. */
gck_active *gck_active_here(gck_active *a, unsigned long thread);

/* From here on, the context that this thread enters for a region knows that run.  Returns the earlier pair, which is
 * swapped in again at the end. */
typedef struct {
    const PyObject *context;         /* borrowed, compared only                          */
    const gck_run  *run;             /* borrowed                                         */
} gck_context_run;
gck_context_run gck_context_run_swap(gck_context_run to);
/* The run is over: active stores forget it. */
void gck_context_run_forget(const gck_state *state, const gck_run *run);
/* Borrowed: the run of the region that enters this context; NULL: it is not known. */
const gck_run *gck_context_run_of(const PyObject *context);

/* Borrowed: the active store that this thread entered with that context; NULL: none. */
gck_active *gck_active_of(gck_state *state, const PyObject *context);

#endif
