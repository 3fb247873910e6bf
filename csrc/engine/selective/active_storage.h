/* active_storage.h: the storages that catch operators in each thread, in a list of the state. */
#ifndef GRADCKPT_ACTIVE_STORAGE_H
#define GRADCKPT_ACTIVE_STORAGE_H

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
    const Py_ssize_t  *saved;        /* how many tensors its region has saved, borrowed; NULL: not known */
    gck_matching       matching;     /* replay                                           */
    /* replay of what torch's mode kept for a trace: defaultdict: key of an operator -> count; owned */
    PyObject          *counts;
    struct gck_active *outer;        /* in the state's list: inner ones first            */
} gck_active;

/* Borrowed: `a` or the next one around it that sees this thread's operators; NULL: none. */
gck_active *gck_active_here(gck_active *a, unsigned long thread);

/* From here on, the context that this thread enters for a region knows how many tensors that region
 * has saved.  The earlier pair is put back at the end. */
typedef struct {
    const PyObject   *context;       /* borrowed, compared only                          */
    const Py_ssize_t *saved;         /* borrowed                                         */
} gck_saved_count;
gck_saved_count gck_saved_count_begin(const PyObject *context, const Py_ssize_t *saved);
void gck_saved_count_end(gck_saved_count before);
/* The count is no longer there: active stores forget it. */
void gck_saved_count_forget(const gck_state *state, const Py_ssize_t *saved);
/* Borrowed: the count of the region that enters this context; NULL: it is not known. */
const Py_ssize_t *gck_saved_count_of(const PyObject *context);

/* Borrowed: the active store that this thread entered with that context; NULL: none. */
gck_active *gck_active_of(gck_state *state, const PyObject *context);

#endif
