/* active_storage.c: the storages that catch operators in each thread. */
#include "engine/selective/active_storage.h"

gck_active *gck_active_here(gck_active *a, unsigned long thread)
{
    while (a != NULL && (a->thread != thread || a->busy || a->hidden)) {
        a = a->outer;
    }
    return a;
}

gck_active *gck_active_of(gck_state *state, const PyObject *context)
{
    const unsigned long thread = PyThread_get_thread_ident();
    gck_active *a = state->active;

    while (a != NULL && (a->thread != thread || a->context != context)) {
        a = a->outer;
    }
    return a;
}
