/* replay_discrete.c: which regions keep discrete outputs. */
#include "engine/selective/replay_discrete.h"

#include "engine/checkpoint_options.h"
#include "engine/selective/checkpoint_replacement.h"

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
    const unsigned long thread = PyThread_get_thread_ident();
    int replay_discrete = 0;

    for (const gck_active *a = state->active; a != NULL; a = a->outer) {
        replay_discrete = a->thread == thread && a->store->replay_discrete > replay_discrete
            ? a->store->replay_discrete : replay_discrete;
    }
    return replay_discrete;
}

PyObject *gck_replays_discrete_py(PyObject *module, PyObject *unused)
{
    (void)unused;
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
