/* op_catching.c: catches operators around a region, by the key or by a mode of ours. */
#include "engine/selective/op_catching.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/tensor.h"
#include "engine/selective/op_labels.h"
#include "engine/selective/selective.h"

int gck_op_catching_begin(gck_state *state, gck_op_catching *c, gck_op_storage *store, PyObject *policy_fn, int replay,
                          const gck_run *run)
{
    int modes;

    c->mode = NULL;
    c->by_key = 0;
    if (store == NULL || (modes = gck_modes_that_watch(&state->py)) < 0) {
        return store == NULL ? 0 : -1;
    }
    if (policy_fn == NULL && !modes && gck_catches_by_key(state, store)) {
        c->by_key = gck_selective_begin(state, &c->active, store, replay, 1, run) == 0;
        return c->by_key ? 0 : -1;
    }
    c->mode = PyObject_CallFunction(state->py.call.selective_mode, "OOi", (PyObject *)store,
                                  policy_fn != NULL ? policy_fn : Py_None, replay);
    const gck_context_run before = gck_context_run_swap((gck_context_run){c->mode, run});
    const int status = c->mode != NULL ? gck_done(PyObject_CallMethod(c->mode, "__enter__", NULL)) : -1;
    gck_context_run_swap(before);
    if (status < 0) {
        Py_CLEAR(c->mode);
    }
    return status;
}

/* End a recompute by the key. */
static int finish(gck_state *state, gck_active *active, int stopped)
{
    gck_error error = gck_error_take();          /* the stop, which the judgement outranks */

    if (gck_selective_finish(state, active, stopped) == 0) {
        return gck_error_return(&error);
    }
    gck_error_drop(&error);
    return -1;
}

/* A pending exception survives, but for the stop of a recompute that is judged. */
int gck_op_catching_end(gck_state *state, gck_op_catching *c)
{
    const int stopped = PyErr_Occurred() && PyErr_ExceptionMatches(state->py.StopRecomputation);
    const int failed = PyErr_Occurred() && !stopped;
    PyObject *exit = NULL;
    gck_error error;

    if (c->by_key && c->active.replay && !failed) {
        return finish(state, &c->active, stopped);
    }
    if (c->by_key) {
        GCK_SCOPED gck_op_storage *store = c->active.replay || failed || stopped ? NULL
                                         : (gck_op_storage *)Py_NewRef((PyObject *)c->active.store);
        gck_selective_end(state, &c->active);
        return store != NULL ? gck_op_labels_finish(store) : 0;
    }
    if (c->mode == NULL) {
        return 0;
    }
    error = gck_error_take();
    exit = failed || stopped ? error.type : Py_None;
    if (gck_done(PyObject_CallMethod(c->mode, "__exit__", "OOO", exit, Py_None, Py_None)) < 0 && stopped) {
        gck_error_drop(&error);                  /* judged */
    }
    gck_error_keep(&error);
    Py_CLEAR(c->mode);
    return gck_error_return(&error);
}
