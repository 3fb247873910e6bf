/* op_storage.h: outputs of operators kept between the forward of a region and its recompute. */
#ifndef GRADCKPT_OP_STORAGE_H
#define GRADCKPT_OP_STORAGE_H

#include "engine/state.h"
#include "engine/selective/op_policy.h"

/* One call of an operator; borrowed. */
typedef struct gck_call {
    PyObject *op, *args, *kwargs;                   /* kwargs may be NULL                         */
    /* the key its calls are stored under: op, or torch's key for a higher order operator */
    PyObject *key;
    PyObject *(*run)(const struct gck_call *call);  /* the operator itself: new reference         */
    void     *with;                                 /* for `run`                                  */
    PyObject *context;                              /* whose policy is asked; NULL: by key        */
    PyObject *calls, *index;                        /* calls[index] is what is kept of it         */
} gck_call;

/* Type gradckpt._C.OpStorage: what one region keeps. */
typedef struct {
    PyObject_HEAD
    gck_state *state;               /* borrowed: the type keeps the module alive                    */
    PyObject  *storage;             /* defaultdict: operator -> calls; torch's modes write into it too */
    int        mutation;            /* entries may have been changed in place                       */
    int        reusable;            /* a call may be replayed more than once                        */
    int        traced;              /* torch's own mode kept every output, for a graph              */
    /* for a node, whose forward runs without grad, where composite operators may call other
     * operators, or with other arguments: a discrete output is replayed only for the same call */
    int        by_call;
    int        replay_discrete;     /* the region may run again on restored values; as in a gck_plan */
    gck_op_policy *policy;          /* owned; NULL: nothing is kept for a policy                    */
    gck_op_policy *discrete_rules;  /* owned; NULL while `replay_discrete` is 0                     */
    /* for each name of the policy, then of `discrete_rules`: a dict call -> what is kept; owned,
     * NULL before the first; malloc */
    PyObject **lines;
    int64_t   *counters;            /* one per group: calls in this forward; malloc                 */
    /* {(operator, call): what it drew, see ../torch/draws.h}; owned, NULL before the first */
    PyObject  *draws;
    /* {(operator, call): what distinguishes it}, where `by_call`; owned, NULL before the first */
    PyObject  *told;
    /* list of (search record of gradckpt._engine.selective_callbacks, line, call), in the
     * forward; or NULL */
    PyObject  *candidates;
    int        met;                 /* listed names that were given                                 */
} gck_op_storage;

extern PyType_Spec gck_op_storage_spec;

/* Which line of the store a call belongs to: that of its name, or one of these. */
enum { GCK_LINE_NONE = -1, GCK_LINE_BY_KEY = -2 };
    /* GCK_LINE_BY_KEY: a function decides, or the trace kept all: the call's key is the line */
int gck_op_storage_find(const gck_op_storage *store, const gck_call *call);
/* Borrowed: the name with that index. */
const gck_op_rule *gck_op_storage_rule(const gck_op_storage *store, int i);
int gck_op_storage_nlines(const gck_op_storage *store);
/* Borrowed: the discrete operator's row under which this call is kept, or NULL. */
const gck_op_rule *gck_op_storage_discrete_rule(const gck_op_storage *store, const gck_call *call);

/* New reference.  policy: NULL for a store of discrete outputs only. */
gck_op_storage *gck_op_storage_new(gck_state *state, gck_op_policy *policy, int mutation, int reusable);

/* Keep discrete outputs too from now on: 1, or 2: also casts.  0 or -1. */
int gck_op_storage_replay_discrete(gck_op_storage *store, int replay_discrete);

/* New reference: {call: what is kept} of a call's operator; NULL: it has none, unless `make`, or an
 * exception is set. */
PyObject *gck_op_storage_calls(gck_op_storage *store, int line, const gck_call *call, int make);

/* Is the object an OpStorage? */
int gck_is_op_storage(PyObject *x);

/* gradckpt._C.make_op_storage(names, mutation, reusable). */
PyObject *gck_make_op_storage(PyObject *module, PyObject *args);

#endif
