/* op_policy.h: operators, and what happens to their outputs. */
#ifndef GRADCKPT_OP_POLICY_H
#define GRADCKPT_OP_POLICY_H

#include "engine/state.h"

/* A policy's answer for an operator's outputs. */
typedef enum {
    GCK_OP_RECOMPUTE,      /* run the operator again                                       */
    GCK_OP_SAVE,           /* keep its outputs, uncompressed or by the plan's codec        */
    GCK_OP_REPLAY,         /* keep a copy, so that changes in place stay legal             */
    /* the same, for casts from floating to any other dtype; other casts are not even counted,
     * because autocast's cache changes their number */
    GCK_OP_REPLAY_CAST,
    GCK_OP_LABEL,          /* keep outputs to which gradckpt.policies.name() gives a name that the policy lists */
    GCK_OP_REPLAY_CHOICE,  /* keep where in its input the result lies, because backward compares the two */
} gck_op_action;

/* What a kept result of an operator does beside restored values. */
typedef enum {
    GCK_OP_PRODUCT,        /* nothing: the gradient is linear in the arguments, or there is none */
    GCK_OP_SEPARATE,       /* its node does not mix it with its arguments, but what follows may */
    GCK_OP_JOINT,          /* the node saves it beside its arguments                      */
    GCK_OP_UNKNOWN,        /* not torch's own: what its node saves is looked at           */
} gck_op_mixing;

/* One named operator. */
typedef struct {
    PyObject *op;            /* OpOverload, borrowed                                         */
    gck_op_action  keep;
    gck_plan  plan;          /* GCK_OP_SAVE: codec NULL keeps exactly                        */
    int       every, phase;  /* of the calls of its group, those with index % every == phase are kept */
    int       group;         /* index into the store's counters                              */
    int       draws;         /* moves a random generator                                     */
    gck_op_mixing  mixing;   /* of an operator whose outputs are kept for the policy         */
    /* an object of gradckpt._engine.discrete_forms that keeps less than the outputs; NULL: they
     * are copied; borrowed */
    PyObject *form;
} gck_op_rule;

/* Type gradckpt._C.OpPolicy: operators, made once for all regions that keep the same. */
typedef struct {
    PyObject_HEAD
    int        n, ngroups;
    int       *slots;    /* a hash table of indices into `named` by operator, -1 where empty; malloc */
    size_t     mask;     /* its size, a power of two, less one                           */
    /* some outputs are kept lossily: which discrete outputs after them are kept, as in a
     * gck_plan */
    int        replay_discrete;
    int        lossy;    /* some outputs are kept lossily                                */
    gck_op_rule *named;  /* n; malloc                                                    */
    PyObject  *rows;     /* the rows it was made of, which own operators and forms; None: a function is asked */
    PyObject  *wanted;   /* frozenset of names, for GCK_OP_LABEL; owned                  */
} gck_op_policy;

extern PyType_Spec gck_op_policy_spec;

/* Index of op, or -1. */
int gck_op_policy_find(const gck_op_policy *names, const PyObject *op);

/* gradckpt._C.make_op_policy(rows, wanted): a row is (op, keep, what gck_options_kept() reads, every, phase, group,
 * form, mixing); rows None: a function decides. */
PyObject *gck_make_op_policy(PyObject *module, PyObject *args);

#endif
