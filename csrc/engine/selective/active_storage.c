/* active_storage.c: the storages that catch operators in each thread. */
#include "engine/selective/active_storage.h"

gck_active *gck_active_of_thread(gck_active *a)
{
    const unsigned long thread = PyThread_get_thread_ident();

    while (a != NULL && a->thread != thread) {
        a = a->outer;
    }
    return a;
}

gck_active *gck_active_here(gck_active *a, unsigned long thread)
{
    while (a != NULL && (a->thread != thread || a->busy || a->hidden)) {
        a = a->outer;
    }
    return a;
}

gck_active *gck_active_of(gck_state *state, const PyObject *context)
{
    gck_active *a = gck_active_of_thread(state->active);

    while (a != NULL && a->context != context) {
        a = gck_active_of_thread(a->outer);
    }
    return a;
}

/* A fact about a thread, which no object holds. */
static _Thread_local gck_context_run now;

gck_context_run gck_context_run_swap(gck_context_run to)
{
    const gck_context_run before = now;

    now = to;
    return before;
}

void gck_context_run_forget(const gck_state *state, const gck_run *run)
{
    for (gck_active *a = state->active; a != NULL; a = a->outer) {
        a->run = a->run == run ? NULL : a->run;
    }
}

const gck_run *gck_context_run_of(const PyObject *context)
{
    return context != NULL && context == now.context ? now.run : NULL;
}
