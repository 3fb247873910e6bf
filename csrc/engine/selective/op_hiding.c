/* op_hiding.c: operators that stores do not see: what a caught operator calls, and what we call. */
#include "engine/selective/op_hiding.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/tensor.h"

void gck_count_busy(gck_state *state, const gck_active *last, int by)
{
    const unsigned long thread = PyThread_get_thread_ident();

    for (gck_active *a = state->active; a != NULL; a = a == last ? NULL : a->outer) {
        a->busy += a->thread == thread && a->busy + by >= 0 ? by : 0;
    }
}

void gck_hide_from_active(gck_state *state, int by)
{
    const unsigned long thread = PyThread_get_thread_ident();

    for (gck_active *a = state->active; a != NULL; a = a->outer) {
        a->hidden += a->thread == thread ? by : 0;
    }
}

int gck_hide_begin(gck_state *state, PyObject **modes)
{
    const int any = gck_modes_that_watch(&state->py), tracing = any > 0 ? gck_tracing(&state->py) : 0;
    const int active = any < 0 || tracing < 0 ? -1 : any && !tracing;    /* tracing needs its modes */

    *modes = active > 0 ? PyObject_CallFunction(state->py.call.without_modes, NULL) : NULL;
    if (active < 0 || (active > 0 && *modes == NULL)) {
        return -1;
    }
    gck_count_busy(state, NULL, 1);
    return 0;
}

int gck_hide_end(gck_state *state, PyObject *modes)
{
    gck_count_busy(state, NULL, -1);
    if (modes == NULL) {
        return 0;
    }
    gck_error error = gck_error_take();
    gck_done(PyObject_CallMethod(modes, "close", NULL));
    Py_DECREF(modes);
    return gck_error_return(&error);
}

int gck_effect_begin(gck_state *state, gck_op_effect effect, PyObject *x)
{
    PyObject *modes;
    int status = gck_is_kept_memory(state, x);

    if (status > 0 && effect == GCK_WRITES && (status = gck_hide_begin(state, &modes)) == 0) {
        status = gck_before_write(state, x);
        status = gck_hide_end(state, modes) < 0 || status < 0 ? -1 : 1;
    }
    return status;
}

int gck_effect_end(gck_state *state, PyObject *x, PyObject *out)
{
    PyObject *modes;
    int status = gck_hide_begin(state, &modes);

    if (status == 0) {
        status = gck_after_view(state, x, out);
        status = gck_hide_end(state, modes) < 0 ? -1 : status;
    }
    return status;
}
