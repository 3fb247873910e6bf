/* op_record_replay.c: what happens to one caught call: it is recorded, or replayed. */
#include "engine/selective/op_record_replay.h"

#include "torch/calls.h"
#include "torch/generators.h"
#include "torch/error.h"
#include "torch/input.h"
#include "torch/objects.h"
#include "engine/checkpoint_options.h"
#include "engine/selective/op_hiding.h"
#include "engine/selective/op_labels.h"
#include "engine/selective/op_mixing.h"
#include "engine/selective/op_outputs.h"
#include "engine/selective/op_policy.h"
#include "engine/selective/replay_discrete.h"

/* 1: a line for discrete outputs, all of which are kept; 0: one of the policy's. */
static int is_discrete(const gck_op_storage *store, int line)
{
    return store->policy == NULL || line >= store->policy->n;
}

/* Are the outputs of this call to be kept? */
static int wanted(gck_op_storage *store, int line)
{
    const gck_op_rule *named = gck_op_storage_rule(store, line);

    if (is_discrete(store, line)) {
        return 1;
    }
    const int64_t call = store->counters[named->group]++;
    return named->keep != GCK_OP_RECOMPUTE && (named->every <= 1 || call % named->every == named->phase);
}

/* The same for a policy that is a function, 1, 0 or -1.  *rule: what happens to the outputs: `own`,
 * filled in, or that of a discrete operator.  *answer: new reference, which has what `own` borrows, or NULL. */
static int ask(gck_op_storage *store, const gck_call *call, PyObject *out, gck_op_rule *own, const gck_op_rule **rule,
               PyObject **answer)
{
    gck_state *state = store->state;
    PyObject *kept = PyObject_CallFunction(state->py.call.ask, "OOOOO", call->context, call->op, call->args,
                                           call->kwargs != NULL ? call->kwargs : Py_None, out);
    int keep = kept == NULL ? -1 : kept != Py_False, mixing = GCK_OP_PRODUCT;

    own->keep = GCK_OP_SAVE;
    if (keep > 0
        && (gck_options_kept(state, kept, &own->plan) < 0
            || (own->plan.codec != NULL && gck_replay_discrete_from(state, store, &own->plan) < 0)
            || (gck_op_storage_is_approximate(store)
                && (mixing = gck_op_mixing_of(&state->py, call->op)) < 0))) {
        keep = -1;
    }
    own->mixing = (gck_op_mixing)mixing;
    *answer = kept;
    const gck_op_rule *discrete_rules = keep >= 0 ? gck_op_storage_discrete_rule(store, call) : NULL;
    const int decide = discrete_rules != NULL && (keep == 0 || discrete_rules->keep == GCK_OP_REPLAY_CHOICE);
    *rule = decide ? discrete_rules : own;
    return decide ? 1 : keep;
}

/* The versions of tensors, added up, and how many they are. */
typedef struct {
    const gck_py *py;
    int64_t       sum;
    int           n;
} versions;

static int add_version(void *with, PyObject *x)
{
    versions *all = with;
    const int tensor = gck_is_tensor(all->py, x);
    int64_t version = 0;

    if (tensor < 0 || (tensor > 0 && gck_version_of(all->py, x, &version) < 0)) {
        return -1;
    }
    all->sum += version;
    all->n += tensor;
    return 0;
}

/* 1 when a higher order operator has to run again, whatever the policy says: it has written into its operands,
 * whose versions were `before`, or it returned no tensor, so it ran for what it writes; 0; -1. */
static int does_more(const gck_py *py, const gck_call *call, int64_t before, PyObject *out)
{
    versions operands = {.py = py}, results = operands;

    return gck_each_item(call->args, add_version, &operands) < 0 || gck_each_item(out, add_version, &results) < 0
        ? -1 : operands.sum != before || results.n == 0;
}

/* Keep those of a call's outputs that the policy names.  The call is one that runs again until they
 * are stored, because the policy and the code that stores them may call operators too.  0 or -1. */
static int keep_outputs(gck_op_storage *store, int line, const gck_call *call, int64_t before, gck_draw *draw,
                        PyObject *out)
{
    gck_op_rule own = {.op = NULL};
    const gck_op_rule *rule = line >= 0 ? gck_op_storage_rule(store, line) : NULL;
    const Py_ssize_t index = gck_op_storage_add(store, call);
    GCK_SCOPED PyObject *answer = NULL;
    PyObject *modes;
    int keep = index < 0 ? -1 : line >= 0 ? wanted(store, line) : ask(store, call, out, &own, &rule, &answer);
    int status;

    if (keep > 0 && rule->keep == GCK_OP_SAVE && gck_op_mixes(store, rule)
        && (rule = gck_op_storage_discrete_rule(store, call)) == NULL) {
        keep = gck_op_runs_again(&store->state->py, call->op);
    }
    if (keep > 0 && call->higher_order) {
        const int more = does_more(&store->state->py, call, before, out);
        keep = more < 0 ? -1 : !more;
    }
    if (keep <= 0 || gck_hide_begin(store->state, &modes) < 0) {
        return keep == 0 ? 0 : -1;
    }
    if (rule->keep == GCK_OP_SAVE) {
        status = gck_op_storage_keep(store, index, gck_op_output_keep(store, out, &rule->plan));
        status = status < 0 ? -1 : gck_op_watch(store, rule, call->op, out);
    } else if (rule->keep == GCK_OP_LABEL) {
        status = gck_op_label_candidate(store, line, index, out);
    } else {
        store->calls[index].lasting = line >= 0 && is_discrete(store, line);
        status = gck_op_storage_keep(store, index, gck_op_output_keep_discrete(store, call, rule->form, out));
    }
    if (status == 0 && draw->before != NULL) {
        status = gck_op_output_note_draw(store, index, draw);
    }
    return gck_hide_end(store->state, modes) < 0 ? -1 : status;
}

/* Read what tells the call from others.  0 or -1. */
static int read_kind(const gck_py *py, gck_call *call, const gck_active *active)
{
    const Py_hash_t hash = call->key == call->op ? (Py_hash_t)(intptr_t)call->op : PyObject_Hash(call->key);

    call->stamp = active->run != NULL && active->run->saved != NULL ? *active->run->saved : 0;
    return hash == -1 ? -1 : gck_call_kind_of(py, active->run, (uint64_t)hash, call->args, call->kwargs, &call->kind);
}

PyObject *gck_record_call(const gck_active *active, gck_op_storage *store, int line, gck_call *call)
{
    gck_py *py = &store->state->py;
    GCK_CLEARED_BY(gck_draw_clear) gck_draw draw = {NULL, NULL};
    versions operands = {.py = py};
    const int draws = (call->higher_order && gck_each_item(call->args, add_version, &operands) < 0) ? -1
                    : read_kind(py, call, active) < 0 ? -1
                    : line >= 0 ? gck_op_storage_rule(store, line)->draws : gck_op_draws(py, call->op);
    GCK_SCOPED PyObject *out = draws < 0 || (draws && gck_draw_begin(py, call->args, call->kwargs, &draw) < 0) ? NULL
                             : call->run(call);

    return out == NULL || keep_outputs(store, line, call, operands.sum, &draw, out) < 0 ? NULL : gck_give(&out);
}

/* The call of the forward whose entry serves this call has just been found.  New reference. */
static PyObject *give(gck_active *active, gck_op_storage *store, gck_call *call, Py_ssize_t index)
{
    const gck_recorded_call *of = &store->calls[index];
    GCK_SCOPED PyObject *entry = Py_NewRef(of->entry), *drawn = Py_XNewRef(of->drawn), *out = NULL;
    PyObject *modes;

    if (entry == store->state->py.consumed_mark) {
        return PyObject_CallFunction(store->state->py.call.raise_torchs, "sOiii", "no_entry", of->key, 0, 1, 1);
    }
    if (!store->reusable && !of->lasting) {
        gck_matching_consume(&active->matching, store, index);
    }
    if (gck_hide_begin(store->state, &modes) < 0) {
        return NULL;
    }
    out = gck_op_output_give(store, call, entry, drawn);
    return gck_hide_end(store->state, modes) < 0 ? NULL : gck_give(&out);
}

/* The same call of a trace, by its number among those of its operator. */
static PyObject *replay_traced(gck_active *active, gck_op_storage *store, gck_call *call)
{
    const gck_py *py = &store->state->py;
    GCK_SCOPED PyObject *counts = Py_XNewRef(active->counts);
    GCK_SCOPED PyObject *calls = Py_XNewRef(PyDict_GetItemWithError(store->storage, call->key));
    GCK_SCOPED PyObject *count = NULL, *index = NULL, *entry = NULL;

    if (calls != NULL && !PyDict_Check(calls)) {
        return PyErr_Format(PyExc_TypeError, "gradckpt: the storage of a selective region holds %R, which gradckpt did "
                                             "not write", calls);
    }
    count = counts != NULL && !PyErr_Occurred() ? PyObject_GetItem(counts, call->key) : NULL;
    index = count != NULL ? PyIter_Next(count) : NULL;
    entry = index != NULL && calls != NULL ? Py_XNewRef(PyDict_GetItemWithError(calls, index)) : NULL;
    if (entry == py->recompute_mark) {
        return call->run(call);
    }
    if (entry != NULL && entry != py->consumed_mark) {
        return store->reusable || PyDict_SetItem(calls, index, py->consumed_mark) == 0
             ? PyObject_CallFunction(py->call.traced_value, "Oi", entry, store->mutation) : NULL;
    }
    return PyErr_Occurred() || index == NULL ? NULL
         : PyObject_CallFunction(py->call.raise_torchs, "sOOii", "no_entry", call->key, index, calls != NULL,
                                 entry != NULL);
}

/* 1 when a kernel in Python below autograd has called the operator, as those of higher order operators do: torch's
 * modes would not see it; 0; -1. */
static int is_part_of_another(const gck_py *py, const gck_call *call)
{
    const int excluded = call->context != NULL || call->higher_order ? 1
                       : gck_is_true(PyObject_CallFunctionObjArgs(py->is_excluded, py->key_inplace, NULL));

    return excluded < 0 ? -1 : !excluded;
}

/* 1 when nothing is kept of a call, or what is kept was written into; 0: it is as it was, or the caller is told; -1. */
static int runs_again(gck_op_storage *store, const gck_call *call, Py_ssize_t index)
{
    GCK_SCOPED PyObject *entry = Py_NewRef(store->calls[index].entry);
    int again = entry == store->state->py.recompute_mark ? 1 : gck_op_output_settle(store, entry);

    if (again == 0 && !store->mutation && (again = gck_op_output_written(store, entry)) > 0) {
        again = is_part_of_another(&store->state->py, call);
    }
    return again;
}

PyObject *gck_replay_call(gck_active *active, gck_call *call)
{
    GCK_SCOPED gck_op_storage *store = (gck_op_storage *)Py_NewRef((PyObject *)active->store);
    Py_ssize_t index;

    if (store->traced) {
        return replay_traced(active, store, call);
    }
    if (read_kind(&store->state->py, call, active) < 0
        || (index = gck_matching_find(&active->matching, store, call)) == -1) {
        return NULL;
    }
    const int again = index == GCK_NO_MATCH ? 1 : runs_again(store, call, index);
    return again < 0 ? NULL : again ? call->run(call) : give(active, store, call, index);
}
