/* selective.h: operators caught while a region runs, to keep their outputs or to replay them. */
#ifndef GRADCKPT_SELECTIVE_H
#define GRADCKPT_SELECTIVE_H

#include "store.h"

/* One store at work in one thread.  On the C stack of the region, or in the heap for
 * contexts that Python enters. */
typedef struct gck_active {
    gck_store         *store;        /* owned                                            */
    int                replay;
    unsigned long      thread;
    int                by_key;       /* else a mode catches, and this only says so       */
    int                busy;         /* its operator runs: nothing below is seen         */
    int                decides;      /* the store keeps decisions: torch's checkpoint does, too */
    PyObject          *context;      /* that Python has entered, borrowed; else NULL     */
    int64_t           *next;         /* replay: the next call of each line; malloc       */
    PyObject          *counts;       /* replay where a function said: defaultdict: key of an operator -> count; owned */
    struct gck_active *outer;        /* in the state's list: inner ones first            */
} gck_active;

/* Catch the named operators in this thread until the end; by_key 0: a mode does it.  0 or -1. */
int  gck_selective_begin(gck_state *state, gck_active *active, gck_store *store, int replay, int by_key);
void gck_selective_end(gck_state *state, gck_active *active);

/* The same, by a mode of ours where modes of others watch, or where the policy is a function.
 * store NULL: nothing is caught.  0 or -1. */
typedef struct {
    gck_active active;
    int        by_key;
    PyObject  *mode;
} gck_catch;
int gck_catch_begin(gck_state *state, gck_catch *c, gck_store *store, PyObject *policy_fn, int replay);
int gck_catch_end(gck_state *state, gck_catch *c);

/* The one rule of who keeps decisions, for every kind of region, after its inputs are packed and before its function
 * runs: a region that may run again on restored values.  Such are `own`, gck_plan's decisions where one of its inputs
 * became a payload, else 0; those of a store whose policy keeps outputs lossily; and all inside one that is such,
 * in its forward and in its recompute.  *store: what the region keeps for its policy, or NULL; made where there is
 * none and decisions are kept.  0 or -1. */
int gck_region_decides(gck_state *state, int own, gck_store **store);

/* A store at work in this thread keeps decisions from now on: a policy that is a function has kept something lossily.
 * 0 or -1. */
int gck_region_decides_from(gck_state *state, gck_store *store, int decisions);

/* The store of `active` keeps decisions: what torch's checkpoint runs inside does so, too.  0 or -1. */
int gck_announce(gck_state *state, gck_active *active);

/* Operators that we call to keep an output, or to give it back, are seen by no region of this thread and by no mode.
 * 0, or -1 with the first exception. */
int gck_hide_begin(gck_state *state, PyObject **modes);
int gck_hide_end(gck_state *state, PyObject *modes);

/* One call that belongs to that line of the store, new reference: run, and what the policy wants of its outputs is kept;
 * or given back as the same call of the forward returned them, or run again. */
PyObject *gck_record_call(gck_store *store, int line, gck_call *call);
PyObject *gck_replay_call(gck_active *active, int line, gck_call *call);

/* Borrowed: what this thread has entered with that context; NULL: nothing. */
gck_active *gck_active_of(gck_state *state, const PyObject *context);

/* For Python: catcher(op), selective_key(), and for tests catch_by_mode(on). */
PyObject *gck_catcher(PyObject *module, PyObject *op);
PyObject *gck_selective_key(PyObject *module, PyObject *unused);
PyObject *gck_decides_py(PyObject *module, PyObject *unused);
PyObject *gck_selective_name(PyObject *module, PyObject *args);

/* 1: the operators that the store names may be caught on the key; 0: a mode has to. */
int gck_catches_by_key(const gck_state *state, const gck_store *store);
PyObject *gck_catch_by_mode(PyObject *module, PyObject *on);

/* mode.c: type gradckpt._C.Context; x got a name under one.  0 or -1. */
extern PyType_Spec gck_context_spec;
int gck_context_name(PyObject *context, PyObject *x, PyObject *name);
/* Borrowed: the store of a context; NULL: it is none of ours. */
gck_store *gck_context_store(const gck_state *state, PyObject *context);

#endif
