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
    int                busy;         /* its operator runs: nothing below is seen         */
    struct gck_active *next;         /* in the state's list: inner ones first            */
} gck_active;

/* Catch the named operators in this thread until the end.  0 or -1. */
int  gck_selective_begin(gck_state *state, gck_active *active, gck_store *store, int replay);
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

/* New reference: an empty store for what operators decide.  NULL with an exception. */
gck_store *gck_decisions(gck_state *state);

/* One call of the store's operator i: keep of its outputs what the policy wants; or give
 * them back, new reference, NULL with *again = 1: run it. */
int       gck_record_call(gck_store *store, int i, PyObject *out);
PyObject *gck_replay_call(gck_store *store, int i, int *again);

/* For Python: selective_enter(store, replay), selective_leave(store), catcher(op), selective_key(). */
PyObject *gck_selective_enter(PyObject *module, PyObject *args);
PyObject *gck_selective_leave(PyObject *module, PyObject *store);
PyObject *gck_catcher(PyObject *module, PyObject *op);
PyObject *gck_selective_key(PyObject *module, PyObject *unused);
PyObject *gck_selective_name(PyObject *module, PyObject *args);

/* mode.c: add_dispatch(class, class). */
PyObject *gck_add_dispatch(PyObject *module, PyObject *args);

#endif
