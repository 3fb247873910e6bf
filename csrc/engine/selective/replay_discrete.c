/* replay_discrete.c: which regions keep discrete outputs. */
#include "engine/selective/replay_discrete.h"

#include "engine/checkpoint_options.h"
#include "torch/calls.h"
#include "torch/error.h"

/* ---- torch's own checkpoint inside a region of ours ----
 *
 * Its recompute would evaluate discrete operators anew, and calls none of our code.  So while a
 * region that keeps discrete outputs runs, torch's function has another body (`__code__`, as under
 * patched()).  It tests whether its thread is inside such a region and then takes the same function
 * in C, equal to torch's but for the discrete outputs; other threads get torch's.  The last region
 * that ends restores the body. */

/* Find what there is to exchange: (torch's name, function, its code, ours), None where other code
 * has replaced torch's function.  0 or -1. */
static int find(gck_state *state)
{
    GCK_SCOPED PyObject *now = PyObject_GetAttrString(state->py.checkpoint_module, "checkpoint");
    const int known = now != NULL && state->torch_checkpoint != NULL
        && PyTuple_GetItem(state->torch_checkpoint, 0) == now;

    if (now == NULL || known) {
        return now == NULL ? -1 : 0;
    }
    GCK_SCOPED PyObject *old = state->torch_checkpoint;
    state->torch_checkpoint = PyObject_CallFunction(state->py.call.torchs_checkpoint, NULL);
    return state->torch_checkpoint == NULL ? -1 : 0;
}

static int exchange(gck_state *state)
{
    int on, status = state->replacements > 0 ? find(state) : 0;

    do {                                         /* an audit hook may let another thread in, which may search anew */
        GCK_SCOPED PyObject *torchs = Py_XNewRef(state->torch_checkpoint);
        on = state->replacements > 0;
        if (status == 0 && torchs != NULL && PyTuple_Size(torchs) == 4) {
            status = PyObject_SetAttrString(PyTuple_GetItem(torchs, 1), "__code__",
                                            PyTuple_GetItem(torchs, on ? 3 : 2));
        }
    } while (on != (state->replacements > 0));
    return status;
}

int gck_replace_checkpoint(gck_state *state, int by)
{
    state->replacements += by;
    if (state->replacements != (by > 0)) {             /* faster: already replaced, or still needed */
        return 0;
    }
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();
    const int status = exchange(state);
    if (status < 0 && by > 0) {
        state->replacements -= by;
    }
    return status;
}

PyObject *gck_replace_checkpoint_py(PyObject *module, PyObject *by)
{
    const long n = PyLong_AsLong(by);

    return PyErr_Occurred() || gck_replace_checkpoint(gck_state_of(module), (int)n) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the rule ---- */

int gck_replay_discrete_announce(gck_state *state, gck_active *active)
{
    if (active->store->replay_discrete > 0 && !active->decides) {
        active->decides = gck_replace_checkpoint(state, 1) == 0;
        return active->decides ? 0 : -1;
    }
    return 0;
}

/* Which discrete outputs the active stores of this thread keep. */
static int replay_discrete_around(const gck_state *state)
{
    int replay_discrete = 0;

    for (const gck_active *a = gck_active_of_thread(state->active); a != NULL; a = gck_active_of_thread(a->outer)) {
        replay_discrete = a->store->replay_discrete > replay_discrete ? a->store->replay_discrete : replay_discrete;
    }
    return replay_discrete;
}

PyObject *gck_replays_discrete_py(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(replay_discrete_around(gck_state_of(module)) > 0);
}

int gck_replay_discrete_from(gck_state *state, gck_op_storage *store, const gck_plan *plan)
{
    int status = plan->replay_discrete > store->replay_discrete
        ? gck_op_storage_replay_discrete(store, plan->replay_discrete) : 0;

    store->approximate_outputs |= gck_plan_is_lossy(plan);
    for (gck_active *a = state->active; status == 0 && a != NULL; a = a->outer) {
        status = a->store == store ? gck_replay_discrete_announce(state, a) : 0;
    }
    return status;
}

int gck_region_replays_discrete(gck_state *state, int own, int approximate, gck_op_storage **store)
{
    const int policy = *store != NULL && (*store)->policy != NULL ? (*store)->policy->replay_discrete : 0;
    const int around = replay_discrete_around(state);
    int replay_discrete = own > policy ? own : policy;

    if (*store != NULL) {
        (*store)->approximate_inputs |= approximate;
    }
    replay_discrete = around > replay_discrete ? around : replay_discrete;
    if (replay_discrete > 0 && *store == NULL) {
        *store = gck_op_storage_new(state, NULL, 0, 1);
    }
    return replay_discrete == 0 ? 0 : *store == NULL ? -1 : gck_op_storage_replay_discrete(*store, replay_discrete);
}
