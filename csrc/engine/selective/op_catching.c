/* op_catching.c: catches operators around a region, by the key or by a mode of ours. */
#include "engine/selective/op_catching.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/tensor.h"
#include "engine/selective/op_labels.h"
#include "engine/selective/selective.h"

int gck_op_catching_begin(gck_state *state, gck_op_catching *c, gck_op_storage *store, PyObject *policy_fn, int replay)
{
    int modes;

    c->mode = NULL;
    c->by_key = 0;
    if (store == NULL || (modes = gck_modes_that_watch(&state->py)) < 0) {
        return store == NULL ? 0 : -1;
    }
    if (policy_fn == NULL && !modes && gck_catches_by_key(state, store)) {
        c->by_key = gck_selective_begin(state, &c->active, store, replay, 1) == 0;
        return c->by_key ? 0 : -1;
    }
    c->mode = PyObject_CallFunction(state->py.call.selective_mode, "OOi", (PyObject *)store,
                                  policy_fn != NULL ? policy_fn : Py_None, replay);
    if (c->mode == NULL || gck_done(PyObject_CallMethod(c->mode, "__enter__", NULL)) < 0) {
        Py_CLEAR(c->mode);
        return -1;
    }
    return 0;
}

/* A pending exception survives. */
int gck_op_catching_end(gck_state *state, gck_op_catching *c)
{
    gck_error error;

    if (c->by_key) {
        gck_op_storage *store = c->active.replay || PyErr_Occurred() ? NULL
                         : (gck_op_storage *)Py_NewRef((PyObject *)c->active.store);
        gck_selective_end(state, &c->active);
        const int status = store != NULL ? gck_op_labels_finish(store) : 0;
        Py_XDECREF((PyObject *)store);
        return status;
    }
    if (c->mode == NULL) {
        return 0;
    }
    error = gck_error_take();
    gck_done(PyObject_CallMethod(c->mode, "__exit__", "OOO", Py_None, Py_None, Py_None));
    gck_error_keep(&error);
    Py_CLEAR(c->mode);
    return gck_error_return(&error);
}
