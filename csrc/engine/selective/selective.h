/* selective.h: catches operators while a region runs, to keep their outputs or to replay them. */
#ifndef GRADCKPT_SELECTIVE_H
#define GRADCKPT_SELECTIVE_H

#include "engine/selective/op_storage.h"

/* One active store of one thread.  It lies on the C stack of the region, or on the heap for
 * contexts that Python enters. */
typedef struct gck_active {
    gck_op_storage         *store;        /* owned                                            */
    int                replay;
    unsigned long      thread;
    int                by_key;       /* else a mode catches, and this entry only records that */
    int                busy;         /* its operator runs: nothing below is seen         */
    int                decides;      /* the store keeps discrete outputs, so torch's checkpoint must too */
    PyObject          *context;      /* the context that Python entered, borrowed; else NULL */
    int64_t           *next;         /* replay: the next call of each line; malloc       */
    /* replay for a policy that is a function: defaultdict: key of an operator -> count; owned */
    PyObject          *counts;
    struct gck_active *outer;        /* in the state's list: inner ones first            */
} gck_active;

/* Catch the named operators in this thread until the end; by_key 0: a mode catches them.  0 or -1. */
int  gck_selective_begin(gck_state *state, gck_active *active, gck_op_storage *store, int replay, int by_key);
void gck_selective_end(gck_state *state, gck_active *active);

/* The same, by a mode of ours where other modes watch, or where the policy is a function. store
 * NULL: nothing is caught.  0 or -1. */
typedef struct {
    gck_active active;
    int        by_key;
    PyObject  *mode;
} gck_op_catching;
int gck_op_catching_begin(gck_state *state, gck_op_catching *c, gck_op_storage *store, PyObject *policy_fn, int replay);
int gck_op_catching_end(gck_state *state, gck_op_catching *c);

/* The one rule for which regions keep discrete outputs, for every kind of region, applied after its
 * inputs are packed and before its function runs: a region that may run again on restored values.
 * `own` is gck_plan's setting where one of its inputs became a payload, else 0.  Also included are
 * stores whose policy keeps outputs lossily, and everything inside such a region, in its forward
 * and in its recompute.  *store: what the region keeps for its policy, or NULL; it is made where
 * none exists and discrete outputs are kept.  0 or -1. */
int gck_region_replays_discrete(gck_state *state, int own, gck_op_storage **store);

/* Make an active store of this thread keep discrete outputs from now on: a policy that is a
 * function has kept an output lossily.  0 or -1. */
int gck_replay_discrete_from(gck_state *state, gck_op_storage *store, int replay_discrete);

/* Make torch's checkpoint, when it runs inside, keep discrete outputs as the store of `active`
 * does.  0 or -1. */
int gck_replay_discrete_announce(gck_state *state, gck_active *active);

/* Hide operators that we call to keep or return an output from every region of this thread and from
 * every mode.  0, or -1 with the first exception. */
int gck_hide_begin(gck_state *state, PyObject **modes);
int gck_hide_end(gck_state *state, PyObject *modes);

/* Run one call that belongs to that line of the store and keep the outputs that the policy names;
 * or return the outputs of the same call of the forward, or run it again.  New reference. */
PyObject *gck_record_call(gck_op_storage *store, int line, gck_call *call);
PyObject *gck_replay_call(gck_active *active, int line, gck_call *call);

/* Borrowed: the active store that this thread entered with that context; NULL: none. */
gck_active *gck_active_of(gck_state *state, const PyObject *context);

/* For Python: catcher(op), selective_key(), and for tests catch_by_mode(on). */
PyObject *gck_catcher(PyObject *module, PyObject *op);
PyObject *gck_selective_key(PyObject *module, PyObject *unused);
PyObject *gck_replays_discrete_py(PyObject *module, PyObject *unused);
PyObject *gck_selective_name(PyObject *module, PyObject *args);

/* 1: the operators that the store names may be caught on the key; 0: a mode has to catch them. */
int gck_catches_by_key(const gck_state *state, const gck_op_storage *store);
PyObject *gck_catch_by_mode(PyObject *module, PyObject *on);

/* selective_mode.c: type gradckpt._C.Context; name x under one.  0 or -1. */
extern PyType_Spec gck_context_spec;
int gck_context_name(PyObject *context, PyObject *x, PyObject *name);
/* Borrowed: the store of a context; NULL: it is not one of ours. */
gck_op_storage *gck_context_store(const gck_state *state, PyObject *context);

#endif
