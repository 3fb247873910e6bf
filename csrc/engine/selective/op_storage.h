/* op_storage.h: outputs of operators kept between the forward of a region and its recompute. */
#ifndef GRADCKPT_OP_STORAGE_H
#define GRADCKPT_OP_STORAGE_H

#include "torch/draws.h"
#include "engine/payload/payload.h"

/* One call of an operator; borrowed. */
typedef struct gck_call {
    PyObject *op, *args, *kwargs;                       /* kwargs may be NULL                         */
    PyObject *key;  /* the key its calls are stored under: op, or torch's key for a higher order operator */
    PyObject *(*run)(const struct gck_call *call);      /* the operator itself: new reference         */
    void     *with;                                     /* for `run`                                  */
    PyObject *context;                                  /* whose policy is asked; NULL: by key        */
    PyObject *calls, *index;                            /* calls[index] is what is kept of it         */
} gck_call;

/* A policy's answer for an operator's outputs. */
typedef enum {
    GCK_OP_RECOMPUTE,           /* run the operator again                                       */
    GCK_OP_SAVE,                /* keep its outputs, uncompressed or by the plan's codec        */
    GCK_OP_REPLAY,              /* keep a copy, so that changes in place stay legal             */
    /* the same, for casts from floating to any other dtype; other casts are not even counted,
     * because autocast's cache changes their number */
    GCK_OP_REPLAY_CAST,
    GCK_OP_LABEL,               /* keep outputs to which gradckpt.policies.name() gives a name that the policy lists */
    GCK_OP_REPLAY_CHOICE,              /* keep where in its input the result lies, because backward compares the two */
} gck_op_action;

/* One named operator. */
typedef struct {
    PyObject *op;            /* OpOverload, borrowed                                         */
    gck_op_action  keep;
    gck_plan  plan;          /* GCK_OP_SAVE: codec NULL keeps exactly                           */
    int       every, phase;  /* of the calls of its group, those with index % every == phase are kept */
    int       group;         /* index into the store's counters                              */
    int       draws;         /* moves a random generator                                     */
    /* an object of gradckpt._engine.discrete_forms that keeps less than the outputs; NULL: they
     * are copied; borrowed */
    PyObject *form;
} gck_op_rule;

/* Type gradckpt._C.OpPolicy: operators, made once for all regions that keep the same. */
typedef struct {
    PyObject_HEAD
    int        n, ngroups;
    int       *slots;        /* a hash table of indices into `named` by operator, -1 where empty; malloc */
    size_t     mask;         /* its size, a power of two, less one                           */
    /* some outputs are kept lossily: which discrete outputs after them are kept, as in a
     * gck_plan */
    int        replay_discrete;
    gck_op_rule *named;        /* n; malloc                                                    */
    PyObject  *rows;         /* the rows it was made of, which own operators and forms; None: a function is asked */
    PyObject  *wanted;       /* frozenset of names, for GCK_OP_LABEL; owned                     */
} gck_op_policy;

/* Type gradckpt._C.OpStorage: what one region keeps. */
typedef struct {
    PyObject_HEAD
    gck_state *state;        /* borrowed: the type keeps the module alive                    */
    PyObject  *storage;      /* defaultdict: operator -> calls; torch's modes write into it too */
    int        mutation;     /* entries may have been changed in place                       */
    int        reusable;     /* a call may be replayed more than once                        */
    int        traced;       /* torch's own mode kept every output, for a graph              */
    /* for a node, whose forward runs without grad, where composite operators may call other
     * operators, or with other arguments: a discrete output is replayed only for the same call */
    int        by_call;
    int        replay_discrete;    /* the region may run again on restored values; as in a gck_plan */
    gck_op_policy *policy;       /* owned; NULL: nothing is kept for a policy                    */
    gck_op_policy *discrete_rules;     /* owned; NULL while `replay_discrete` is 0                           */
    /* for each name of the policy, then of `discrete_rules`: a dict call -> what is kept; owned, NULL
     * before the first; malloc */
    PyObject **lines;
    int64_t   *counters;     /* one per group: calls in this forward; malloc                 */
    PyObject  *draws;        /* {(operator, call): what it drew, see ../torch/draws.h}; owned, NULL before the first */
    PyObject  *told;  /* {(operator, call): what distinguishes it}, where `by_call`; owned, NULL before the first */
    /* list of (search record of gradckpt._engine.selective_callbacks, line, call), in the
     * forward; or NULL */
    PyObject  *candidates;
    int        met;          /* listed names that were given                                 */
} gck_op_storage;

/* Index of op, or -1. */
int gck_op_policy_find(const gck_op_policy *names, const PyObject *op);

extern PyType_Spec gck_op_policy_spec, gck_op_storage_spec, gck_op_output_spec;

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

/* Keep the outputs of a call in its place: a tensor as a detached alias or a payload (of several
 * return values only the first), anything else by reference.  0 or -1. */
int gck_op_output_keep(gck_op_storage *store, const gck_call *call, PyObject *out, const gck_plan *plan);
/* Keep a discrete output in its form, or as copies; bool as bits. */
int gck_op_output_keep_discrete(gck_op_storage *store, const gck_call *call, PyObject *form, PyObject *out);
/* Remember an output that may get a name later in the forward. */
int gck_op_label_candidate(gck_op_storage *store, int line, const gck_call *call, PyObject *out);

/* Keep what the call drew from a generator, so that its replay leaves the generator where the call
 * did.  0 or -1. */
int gck_op_output_note_draw(gck_op_storage *store, const gck_call *call, gck_draw *draw);

/* Remember which call a discrete output comes from, where `by_call`.  0 or -1. */
int gck_op_output_note_call(gck_op_storage *store, const gck_call *call);
/* 1: the entry at its place is a discrete output of this call; 0: of another call; -1; otherwise
 * `unknown`. */
int gck_op_output_is_of_call(gck_op_storage *store, const gck_call *call, int unknown);

/* New reference: the kept outputs of that call; its generator is set to its state after the call.
 * lasting: the entry stays, also in a store that serves one backward. */
PyObject *gck_op_output_give(gck_op_storage *store, const gck_call *call, PyObject *entry, int lasting);

/* x got a name; keep the call that made it if the name is listed.  0 or -1. */
int gck_op_label(gck_op_storage *store, PyObject *x, PyObject *name);

/* The forward is over.  0, or -1 with what a warning raised. */
int gck_op_labels_finish(gck_op_storage *store);

/* Is the object an OpStorage? */
int gck_is_op_storage(PyObject *x);

/* gradckpt._C.make_op_policy(rows, wanted): a row is (op, keep, compress=, every, phase, group, form);
 * rows None: a function decides.
 * gradckpt._C.make_op_storage(names, mutation, reusable). */
PyObject *gck_make_op_policy(PyObject *module, PyObject *args);
PyObject *gck_make_op_storage(PyObject *module, PyObject *args);

#endif
