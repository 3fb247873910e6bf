/* op_hiding.c: operators that stores do not see: what a caught operator calls, and what we call. */
#include "engine/selective/op_hiding.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/tensor.h"

void gck_count_busy(gck_state *state, const gck_active *last, int by)
{
    for (gck_active *a = gck_active_of_thread(state->active); a != NULL;
         a = a == last ? NULL : gck_active_of_thread(a->outer)) {
        a->busy += a->busy + by >= 0 ? by : 0;
    }
}

void gck_hide_from_active(gck_state *state, int by)
{
    for (gck_active *a = gck_active_of_thread(state->active); a != NULL; a = gck_active_of_thread(a->outer)) {
        a->hidden += by;
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
