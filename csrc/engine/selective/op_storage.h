/* op_storage.h: outputs of operators kept between the forward of a region and its recompute. */
#ifndef GRADCKPT_OP_STORAGE_H
#define GRADCKPT_OP_STORAGE_H

#include "engine/state.h"
#include "engine/selective/call_kind.h"
#include "engine/selective/op_policy.h"

/* One call of an operator; borrowed. */
typedef struct gck_call {
    PyObject *op, *args, *kwargs;                   /* kwargs may be NULL                         */
    /* the key its calls are stored under: op, or torch's key for a higher order operator */
    PyObject *key;
    int       higher_order;                         /* no schema tells what it writes             */
    PyObject *(*run)(const struct gck_call *call);  /* the operator itself: new reference         */
    void     *with;                                 /* for `run`                                  */
    PyObject *context;                              /* whose policy is asked; NULL: by key        */
    gck_call_kind kind;
    Py_ssize_t stamp;                               /* tensors that the region had saved before it */
} gck_call;

/* One call of the forward, for a call of the recompute that matches it. */
typedef struct {
    gck_call_kind kind;
    Py_ssize_t    stamp;
    PyObject     *key;      /* owned                                                              */
    /* what is kept of it; recompute_mark: nothing, it runs again; consumed_mark: it was handed out;
     * owned */
    PyObject     *entry;
    PyObject     *drawn;    /* what it drew, see torch/generators.h; owned, NULL: nothing          */
    int           lasting;  /* the entry stays, also in a store that serves one backward          */
} gck_recorded_call;

/* The latest call of an operator of which it is not known what its node saves. */
enum { GCK_WATCHED = 8, GCK_SAVES_RESULT = 1, GCK_SAVES_ARGUMENT = 2 };
typedef struct {
    PyObject   *op;       /* owned; NULL: there is none                                         */
    int64_t     node;     /* its number                                                         */
    const char *data[GCK_WATCHED];    /* the memory of the call's first outputs, compared only  */
    int64_t     nbytes[GCK_WATCHED];
    int         n, saves;
} gck_op_watched;

/* Type gradckpt._C.OpStorage: what one region keeps. */
typedef struct {
    PyObject_HEAD
    gck_state *state;               /* borrowed: the type keeps the module alive                    */
    /* defaultdict {operator: {number: what is kept}}: where torch's own mode writes while it traces;
     * else a picture of `calls` that is made for who looks at it */
    PyObject  *storage;
    gck_recorded_call *calls;       /* of the forward, in order; malloc                             */
    Py_ssize_t ncalls, room;
    int64_t    random_bytes;        /* counted for what the calls drew                              */
    int        stamped;             /* its calls have stamps                                        */
    int        mutation;            /* entries may have been changed in place                       */
    int        reusable;            /* a call may be replayed more than once                        */
    int        shown;               /* saved-tensor hooks of the user's see what is kept; -1: torch's default */
    const PyObject *alone;          /* compared only: the pack hook of its region, if no hooks were around that */
    PyObject  *hooks;               /* borrowed: their pair, while something is kept; NULL: none    */
    int        traced;              /* torch's own mode kept every output, for a graph              */
    /* the recompute may get other values than the forward: outputs of the policy's, or also the inputs */
    int        approximate_outputs, approximate_inputs;
    gck_op_watched watched;
    int        replay_discrete;     /* then: which discrete outputs are kept, as in a gck_plan       */
    gck_op_policy *policy;          /* owned; NULL: nothing is kept for a policy                    */
    gck_op_policy *discrete_rules;  /* owned; NULL while `replay_discrete` is 0                     */
    int64_t   *counters;            /* one per group: calls in this forward; malloc                 */
    /* list of (search record of gradckpt._engine.selective_callbacks, line, index in `calls`), in
     * the forward; or NULL */
    PyObject  *candidates;
    int        met;                 /* listed names that were given                                 */
} gck_op_storage;

extern PyType_Spec gck_op_storage_spec;

/* Which line of the store a call belongs to: that of its name, or one of these. */
enum { GCK_LINE_NONE = -1, GCK_LINE_BY_KEY = -2 };
    /* GCK_LINE_BY_KEY: a function decides, or the trace kept all */
int gck_op_storage_find(const gck_op_storage *store, const gck_call *call);
/* Borrowed: the name with that index. */
const gck_op_rule *gck_op_storage_rule(const gck_op_storage *store, int i);
/* Borrowed: the discrete operator's row under which this call is kept, or NULL. */
const gck_op_rule *gck_op_storage_discrete_rule(const gck_op_storage *store, const gck_call *call);

/* New reference.  policy: NULL for a store of discrete outputs only. */
gck_op_storage *gck_op_storage_new(gck_state *state, gck_op_policy *policy, int mutation, int reusable);

/* Keep discrete outputs too from now on: 1, or 2: also casts.  0 or -1. */
int gck_op_storage_replay_discrete(gck_op_storage *store, int replay_discrete);

/* 1 when the recompute may get other values than the forward. */
static inline int gck_op_storage_is_approximate(const gck_op_storage *store)
{
    return store->approximate_inputs || store->approximate_outputs;
}

/* Add a call of the forward, of which nothing is kept yet.  Its index, or -1. */
Py_ssize_t gck_op_storage_add(gck_op_storage *store, const gck_call *call);
/* Keep this, taken over, of a call; NULL: making it raised.  0 or -1. */
int gck_op_storage_keep(gck_op_storage *store, Py_ssize_t index, PyObject *entry);
/* New reference: `storage`. */
PyObject *gck_op_storage_picture(gck_op_storage *store);

/* Is the object an OpStorage? */
int gck_is_op_storage(PyObject *x);

/* gradckpt._C.make_op_storage(names, mutation, reusable, approximate_inputs). */
PyObject *gck_make_op_storage(PyObject *module, PyObject *args);

#endif
