/* store.h: outputs of operators kept between the forward of a region and its recompute. */
#ifndef GRADCKPT_STORE_H
#define GRADCKPT_STORE_H

#include "../torch/draws.h"
#include "payload.h"

/* One call of an operator; borrowed. */
typedef struct gck_call {
    PyObject *op, *args, *kwargs;                       /* kwargs may be NULL                         */
    PyObject *(*run)(const struct gck_call *call);      /* the operator itself: new reference         */
    void     *with;                                     /* for `run`                                  */
} gck_call;

/* What a policy says of an operator's outputs. */
typedef enum {
    GCK_RECOMPUTE,           /* run it again                                                 */
    GCK_SAVE,                /* keep its outputs: as they are, or by the plan's codec        */
    GCK_DECIDE,              /* keep a copy: nobody who changes them in place is refused     */
    GCK_DECIDE_CAST,         /* the same, of casts from floating to anything else; other casts
                                are not even counted: autocast's cache changes their number  */
    GCK_NAMED,               /* keep them if gradckpt.name() gives them a name that is wanted */
    GCK_CHOOSE,              /* keep where in its input the result lies: backward compares the two */
} gck_keep;

/* One named operator. */
typedef struct {
    PyObject *op;            /* OpOverload, owned                                            */
    gck_keep  keep;
    gck_plan  plan;          /* GCK_SAVE: codec NULL keeps exactly                           */
    int       every, phase;  /* of the calls of its group, those with index % every == phase */
    int       group;         /* index into the store's counters                              */
    int       draws;         /* moves a random generator                                     */
    PyObject *form;          /* what is kept in place of the outputs: an object of gradckpt._forms; NULL: they
                                are copied; owned                                            */
} gck_named;

/* Type gradckpt._C.Names: which operators, made once for all regions that keep alike. */
typedef struct {
    PyObject_HEAD
    int        n, ngroups;
    int       *slots;        /* a hash table of indices into `named` by operator, -1 where empty; malloc */
    size_t     mask;         /* its size is a power of two: less one                         */
    int        asks;         /* no names: a function is asked                                */
    int        decisions;    /* some outputs are kept lossily: of what follows them, as in a gck_plan */
    gck_named *named;        /* n; malloc                                                    */
    PyObject  *wanted;       /* frozenset of names, for GCK_NAMED; owned                     */
} gck_names;

/* The calls of one named operator in one region. */
typedef struct {
    PyObject *calls;         /* dict: call -> what is kept; owned, NULL before the first     */
    int64_t   next;          /* call of the forward                                          */
} gck_line;

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
    gck_line  *lines;        /* one per name of the policy, then per name of `deciding`; malloc */
    int64_t   *counters;     /* one per group: calls in this forward; malloc                 */
    PyObject  *draws;        /* {(operator, call): what it drew, see ../torch/draws.h}; owned, NULL before the first */
    PyObject  *told;         /* {(operator, call): what tells it from others}, where `by_call`; owned, NULL before the first */
    PyObject  *candidates;   /* list of (what gradckpt._selection finds it by, line, call), in the forward; or NULL */
    int        met;          /* names that were wanted and given                             */
} gck_store;

/* Index of op, or -1. */
int gck_names_find(const gck_names *names, const PyObject *op);

extern PyType_Spec gck_names_spec, gck_store_spec, gck_kept_spec;

/* Index of op among the names, or -1: not there, or not such a call. */
int gck_store_find(const gck_store *store, const PyObject *op, PyObject *args, PyObject *kwargs);
/* Borrowed: the name with that index. */
const gck_named *gck_store_named(const gck_store *store, int i);
int gck_store_nlines(const gck_store *store);
/* Borrowed: the deciding name that this call is kept as, or NULL. */
const gck_named *gck_store_deciding(const gck_store *store, const PyObject *op, PyObject *args, PyObject *kwargs);

/* New reference.  policy: NULL for a store of decisions alone. */
gck_store *gck_store_new(gck_state *state, gck_names *policy, int mutation, int reusable);

/* From now on it keeps decisions, too: 1, or 2: also casts.  0 or -1. */
int gck_store_decide_from(gck_store *store, int decisions);

/* The outputs of a call into calls[index]: a tensor as a detached alias or a payload (of
 * several return values the first only), anything else as it is.  0 or -1. */
int gck_store_keep(gck_store *store, PyObject *calls, PyObject *index, PyObject *out, const gck_plan *plan);
/* What an operator decided: in its form, or as copies; bool as bits. */
int gck_store_decide(gck_store *store, PyObject *calls, PyObject *index, const gck_call *call, PyObject *form, PyObject *out);
int gck_store_skip(gck_store *store, PyObject *calls, PyObject *index);

/* What the call drew from a generator, so that its replay leaves the generator where the call did.  0 or -1. */
int gck_store_drew(gck_store *store, PyObject *op, PyObject *index, gck_draw *draw);

/* Remember which call a decision comes from, where `by_call`.  0 or -1. */
int gck_store_tell(gck_store *store, PyObject *op, PyObject *index, const gck_call *call);
/* 1: `index` of the forward was a decision of this call; 0: of another one; -1; otherwise, as `unknown`. */
int gck_store_is_told(gck_store *store, PyObject *op, PyObject *index, const gck_call *call, int unknown);

/* New reference: the outputs of that call, its generator where it left it; NULL with *again = 1 and no exception:
 * to be recomputed.  lasting: the entry stays, also in a store that serves one backward. */
PyObject *gck_store_replay(gck_store *store, const gck_call *call, PyObject *key, PyObject *calls, PyObject *index, int lasting,
                           int *again);

/* An output that may get a name later in the forward.  0 or -1. */
int gck_store_candidate(gck_store *store, int line, PyObject *index, PyObject *out);

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
