/* replay_discrete.c: which regions keep discrete outputs. */
#include "engine/selective/selective.h"
#include "engine/selective/checkpoint_replacement.h"

int gck_announce(gck_state *state, gck_active *active)
{
    if (active->store->decisions > 0 && !active->decides) {
        active->decides = gck_stand_in(state, 1) == 0;
        return active->decides ? 0 : -1;
    }
    return 0;
}

/* Which discrete outputs the active stores of this thread keep. */
static int decisions_around(const gck_state *state)
{
    const unsigned long thread = PyThread_get_thread_ident();
    int decisions = 0;

    for (const gck_active *a = state->active; a != NULL; a = a->outer) {
        decisions = a->thread == thread && a->store->decisions > decisions ? a->store->decisions : decisions;
    }
    return decisions;
}

PyObject *gck_decides_py(PyObject *module, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(decisions_around(gck_state_of(module)) > 0);
}

int gck_region_decides_from(gck_state *state, gck_store *store, int decisions)
{
    int status = gck_store_decide_from(store, decisions);

    for (gck_active *a = state->active; status == 0 && a != NULL; a = a->outer) {
        status = a->store == store ? gck_announce(state, a) : 0;
    }
    return status;
}

int gck_region_decides(gck_state *state, int own, gck_store **store)
{
    const int policy = *store != NULL && (*store)->policy != NULL ? (*store)->policy->decisions : 0;
    const int around = decisions_around(state);
    int decisions = own > policy ? own : policy;

    decisions = around > decisions ? around : decisions;
    if (decisions > 0 && *store == NULL) {
        *store = gck_store_new(state, NULL, 0, 1);
    }
    return decisions == 0 ? 0 : *store == NULL ? -1 : gck_store_decide_from(*store, decisions);
}
