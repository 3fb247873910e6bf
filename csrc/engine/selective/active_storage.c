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

/* A fact about a thread, which no object holds. */
static _Thread_local gck_saved_count now;

gck_saved_count gck_saved_count_begin(const PyObject *context, const Py_ssize_t *saved)
{
    const gck_saved_count before = now;

    now = (gck_saved_count){context, saved};
    return before;
}

void gck_saved_count_end(gck_saved_count before) { now = before; }

void gck_saved_count_forget(const gck_state *state, const Py_ssize_t *saved)
{
    for (gck_active *a = state->active; saved != NULL && a != NULL; a = a->outer) {
        a->saved = a->saved == saved ? NULL : a->saved;
    }
}

const Py_ssize_t *gck_saved_count_of(const PyObject *context)
{
    return context != NULL && context == now.context ? now.saved : NULL;
}
