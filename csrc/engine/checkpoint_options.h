/* checkpoint_options.h: the keywords of checkpoint() and what they mean; the one rule for which tensors compress=
 * compresses, before their memory is looked at. */
#ifndef GRADCKPT_CHECKPOINT_OPTIONS_H
#define GRADCKPT_CHECKPOINT_OPTIONS_H

#include "engine/state.h"

/* Borrowed from the caller; NULL when not given. */
typedef struct {
    PyObject *function;
#define OPTION(name) PyObject *name;
    GCK_OPTIONS(OPTION)
#undef OPTION
    int       exact;               /* called through gradckpt.compat: torch's defaults, no keywords of ours */
    PyObject *once;                /* buffers=: of what the statistics are updated once a step: modules;
                                    * None: the module that the function is or belongs to; NULL: of nothing */
} gck_options;

/* Our keywords go to *o, the rest to *kwargs (new reference, or NULL when none are left).  exact:
 * only torch's keywords count.  0, or -1 with an exception. o->function stays NULL when none was
 * given. */
int gck_options_parse(gck_state *state, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, int exact,
                      gck_options *o, PyObject **kwargs);

/* compress= as a plan; codec NULL: none.  0 or -1. */
int gck_options_plan(gck_state *state, PyObject *compress, gck_plan *plan);

/* offload= for a plan: *place, new reference or NULL, which has to live as long as the plan.  A plan without a codec
 * then has the codec raw.  0 or -1. */
int gck_options_place(gck_state *state, PyObject *offload, gck_plan *plan, PyObject **place);

/* What a policy keeps: compress=, or (compress=, Place), which the plan borrows.  0 or -1. */
int gck_options_kept(gck_state *state, PyObject *kept, gck_plan *plan);

/* 1 when what this plan keeps is restored with other values than the forward had. */
int gck_plan_is_lossy(const gck_plan *plan);

/* *metadata_fn: new reference to the function that reads what is compared, when the user added a check
 * to torch's dict; else NULL.  exact: of torch's words only.  0, or -1 with ValueError. */
int gck_options_determinism(const gck_state *state, PyObject *value, int exact, gck_check *check,
                            PyObject **metadata_fn);

/* Read a global of torch.utils.checkpoint that overrides an argument unless it is None: 1, 0, -1
 * with an exception.  `missing`: the value when neither is given. */
int gck_options_overridden(const gck_state *state, PyObject *name, PyObject *argument, int missing);

/* 1 when context_fn= is not torch's default. */
int gck_options_custom_context(const gck_state *state, const gck_options *o);

/* 1 when policy= says something. */
int gck_options_policy(const gck_options *o);

/* Truth of an argument that may be missing: 1, 0, -1 with an exception. */
int gck_truth(PyObject *value, int missing);

/* GCK_COMPRESS, GCK_SKIP_NO_GRAD or GCK_SKIP_LEAF.  What does not require grad is skipped first,
 * whatever `leaf` says. */
gck_skip_reason gck_eligible(const gck_plan *plan, int requires_grad, int leaf, int parameter);

/* For Python: eligible(requires_grad, is_leaf, floating, fake_quantize), of what is no
 * parameter. */
PyObject *gck_eligible_py(PyObject *module, PyObject *args);

#endif
