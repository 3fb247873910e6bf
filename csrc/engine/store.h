/* store.h: outputs of operators kept between the forward of a region and its recompute. */
#ifndef GRADCKPT_STORE_H
#define GRADCKPT_STORE_H

#include "../torch/draws.h"
#include "payload.h"

/* One call of an operator; borrowed. */
typedef struct gck_call {
    PyObject *op, *args, *kwargs;                       /* kwargs may be NULL                         */
    PyObject *key;                                      /* under which its calls are stored: op, or, of a higher order
                                                           operator, what torch says                  */
    PyObject *(*run)(const struct gck_call *call);      /* the operator itself: new reference         */
    void     *with;                                     /* for `run`                                  */
    PyObject *context;                                  /* whose policy is asked; NULL: by key        */
    PyObject *calls, *index;                            /* calls[index] is what is kept of it         */
} gck_call;

/* What a policy says of an operator's outputs. */
typedef enum {
    GCK_RECOMPUTE,           /* run it again                                                 */
    GCK_SAVE,                /* keep its outputs: as they are, or by the plan's codec        */
    GCK_DECIDE,              /* keep a copy: nobody who changes them in place is refused     */
    GCK_DECIDE_CAST,         /* the same, of casts from floating to anything else; other casts
                                are not even counted: autocast's cache changes their number  */
    GCK_NAMED,               /* keep them if gradckpt.policies.name() gives them a name that is wanted */
    GCK_CHOOSE,              /* keep where in its input the result lies: backward compares the two */
} gck_keep;

/* One named operator. */
typedef struct {
    PyObject *op;            /* OpOverload, borrowed                                         */
    gck_keep  keep;
    gck_plan  plan;          /* GCK_SAVE: codec NULL keeps exactly                           */
    int       every, phase;  /* of the calls of its group, those with index % every == phase */
    int       group;         /* index into the store's counters                              */
    int       draws;         /* moves a random generator                                     */
    PyObject *form;          /* what is kept in place of the outputs: an object of gradckpt._forms; NULL: they
                                are copied; borrowed                                         */
} gck_named;

/* Type gradckpt._C.Names: which operators, made once for all regions that keep alike. */
typedef struct {
    PyObject_HEAD
    int        n, ngroups;
    int       *slots;        /* a hash table of indices into `named` by operator, -1 where empty; malloc */
    size_t     mask;         /* its size is a power of two: less one                         */
    int        decisions;    /* some outputs are kept lossily: of what follows them, as in a gck_plan */
    gck_named *named;        /* n; malloc                                                    */
    PyObject  *rows;         /* what they were made of, which owns operators and forms; None: a function is asked */
    PyObject  *wanted;       /* frozenset of names, for GCK_NAMED; owned                     */
} gck_names;

/* Type gradckpt._C.Store: what one region keeps. */
typedef struct {
    PyObject_HEAD
    gck_state *state;        /* borrowed: the type keeps the module alive                    */
    PyObject  *storage;      /* defaultdict: operator -> calls; torch's modes write into it, too */
    int        mutation;     /* entries may have been changed in place                       */
    int        reusable;     /* a call may be replayed more than once                        */
    int        traced;       /* torch's own mode kept every output, for a graph              */
    int        by_call;      /* of a node: its forward runs without grad, where operators made of others may call
                                other ones, or with other arguments: a decision is replayed to the same call only */
    int        decisions;    /* the region may run again on restored values; as in a gck_plan */
    gck_names *policy;       /* owned; NULL: nothing is kept for a policy                    */
    gck_names *deciding;     /* owned; NULL while `decisions` is 0                           */
    PyObject **lines;        /* the calls of each name of the policy, then of `deciding`: a dict call -> what is kept;
                                owned, NULL before the first; malloc                         */
    int64_t   *counters;     /* one per group: calls in this forward; malloc                 */
    PyObject  *draws;        /* {(operator, call): what it drew, see ../torch/draws.h}; owned, NULL before the first */
    PyObject  *told;         /* {(operator, call): what tells it from others}, where `by_call`; owned, NULL before the first */
    PyObject  *candidates;   /* list of (what gradckpt._selection finds it by, line, call), in the forward; or NULL */
    int        met;          /* names that were wanted and given                             */
} gck_store;

/* Index of op, or -1. */
int gck_names_find(const gck_names *names, const PyObject *op);

extern PyType_Spec gck_names_spec, gck_store_spec, gck_kept_spec;

/* Which line of the store a call belongs to: that of its name, or one of these. */
enum { GCK_NOT_NAMED = -1, GCK_ASKED = -2 };     /* GCK_ASKED: a function says, or the trace kept all: the call's key does */
int gck_store_find(const gck_store *store, const gck_call *call);
/* Borrowed: the name with that index. */
const gck_named *gck_store_named(const gck_store *store, int i);
int gck_store_nlines(const gck_store *store);
/* Borrowed: the deciding name that this call is kept as, or NULL. */
const gck_named *gck_store_deciding(const gck_store *store, const gck_call *call);

/* New reference.  policy: NULL for a store of decisions alone. */
gck_store *gck_store_new(gck_state *state, gck_names *policy, int mutation, int reusable);

/* From now on it keeps decisions, too: 1, or 2: also casts.  0 or -1. */
int gck_store_decide_from(gck_store *store, int decisions);

/* New reference: {call: what is kept} of a call's operator; NULL: it has none, unless `make`, or an exception is set. */
PyObject *gck_store_calls(gck_store *store, int line, const gck_call *call, int make);

/* The outputs of a call into its place: a tensor as a detached alias or a payload (of
 * several return values the first only), anything else as it is.  0 or -1. */
int gck_store_keep(gck_store *store, const gck_call *call, PyObject *out, const gck_plan *plan);
/* What an operator decided: in its form, or as copies; bool as bits. */
int gck_store_decide(gck_store *store, const gck_call *call, PyObject *form, PyObject *out);
/* An output that may get a name later in the forward. */
int gck_store_candidate(gck_store *store, int line, const gck_call *call, PyObject *out);

/* What the call drew from a generator, so that its replay leaves the generator where the call did.  0 or -1. */
int gck_store_drew(gck_store *store, const gck_call *call, gck_draw *draw);

/* Remember which call a decision comes from, where `by_call`.  0 or -1. */
int gck_store_tell(gck_store *store, const gck_call *call);
/* 1: its place of the forward was a decision of this call; 0: of another one; -1; otherwise, as `unknown`. */
int gck_store_is_told(gck_store *store, const gck_call *call, int unknown);

/* New reference: the outputs of that call, its generator where it left it, out of what was kept.  lasting: that stays,
 * also in a store that serves one backward. */
PyObject *gck_store_give(gck_store *store, const gck_call *call, PyObject *entry, int lasting);

/* x got a name; the call that made it is kept if the name is wanted here.  0 or -1. */
int gck_store_name(gck_store *store, PyObject *x, PyObject *name);

/* The forward is over.  0, or -1 with what a warning raised. */
int gck_store_finish(gck_store *store);

/* Is the object a Store? */
int gck_is_store(PyObject *x);

/* gradckpt._C.make_names(rows, wanted): a row is (op, keep, what compress= takes, every, phase, group, form);
 * None: a function will say.
 * gradckpt._C.make_store(names, mutation, reusable). */
PyObject *gck_make_names(PyObject *module, PyObject *args);
PyObject *gck_make_store(PyObject *module, PyObject *args);

#endif
