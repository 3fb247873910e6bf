/* saved_samples.c: samples of what the first region of each kind saves, in both of its runs. */
#include "engine/region/saved_samples.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/tensor.h"
#include "engine/checkpoint_options.h"
#include "engine/region/running.h"
#include "engine/selective/op_hiding.h"

#include <string.h>

enum { MOST_LOOKS = 4 };           /* regions of a kind that died unjudged, as in evaluation, before it is given up */

/* ---- kinds ---- */

/* What tells kinds apart.  New references: the class and the code of a method, the code of a function, or
 * the class of anything else that is called.  0 or -1. */
static int kind_of(const gck_py *py, PyObject *function, gck_kind *kind)
{
    PyObject *f = Py_NewRef(function), *next, *self;

    while (f != NULL && (PyObject *)Py_TYPE(f) == py->partial) {
        next = PyObject_GetAttr(f, py->names.func);
        Py_DECREF(f);
        f = next;
    }
    if (f == NULL) {
        return -1;
    }
    if ((PyObject *)Py_TYPE(f) == py->FunctionType) {
        kind->of = PyObject_GetAttr(f, py->names.__code__);
    } else if ((PyObject *)Py_TYPE(f) == py->MethodType) {
        self = PyObject_GetAttr(f, py->names.__self__);
        kind->of = self != NULL ? Py_NewRef((PyObject *)Py_TYPE(self)) : NULL;
        kind->method = self != NULL ? PyObject_GetAttr(f, py->names.__code__) : NULL;    /* of its function */
        Py_XDECREF(self);
        if (self != NULL && kind->method == NULL && gck_clear_attribute_error() < 0) {
            Py_DECREF(f);
            return -1;
        }
    } else {
        kind->of = Py_NewRef((PyObject *)Py_TYPE(f));
    }
    Py_DECREF(f);
    return PyErr_Occurred() ? -1 : 0;
}

static void clear_kind(gck_kind *kind)
{
    Py_CLEAR(kind->of);
    Py_CLEAR(kind->method);
}

/* Borrowed: the row of the region's kind, made if it is new; NULL: none, as the table is full, or with an exception.
 * The references of the row are strong, as an address may serve another function later. */
static gck_kind *row_of(gck_state *state, PyObject *function, const gck_codec *codec)
{
    gck_kind kind = {.codec = codec};
    gck_kind *row = NULL;

    if (kind_of(&state->py, function, &kind) < 0) {
        clear_kind(&kind);
        return NULL;
    }
    for (int i = state->kinds_from; row == NULL && i < state->nkinds; i++) {
        gck_kind *at = &state->kinds[i];
        row = at->of == kind.of && at->method == kind.method && at->codec == codec ? at : NULL;
    }
    if (row == NULL && state->nkinds < GCK_NKINDS) {
        row = &state->kinds[state->nkinds++];
        *row = kind;
    } else {
        clear_kind(&kind);
    }
    return row;
}

PyObject *gck_judge_anew(PyObject *module, PyObject *on)
{
    gck_state *state = gck_state_of(module);

    if (on == Py_True) {
        const int before = state->kinds_from;
        state->kinds_from = state->nkinds;
        return PyLong_FromLong(before);
    }
    const long before = PyLong_AsLong(on);
    if (before == -1 && PyErr_Occurred()) {
        return NULL;
    }
    while (state->nkinds > state->kinds_from) {
        gck_kind dropped = state->kinds[--state->nkinds];
        clear_kind(&dropped);
    }
    state->kinds_from = (int)before;
    Py_RETURN_NONE;
}

/* ---- samples ---- */

/* The codec whose error the recompute meets: that of the arguments, else of outputs that the policy keeps.  NULL:
 * none, a function decides, or it is bf16, with which the others are compared. */
static const gck_codec *codec_of(const gck_frame *frame, const gck_plan *plan)
{
    const gck_op_storage *store = gck_frame_store(frame);
    const gck_op_policy *policy = store != NULL && store->policy != NULL && store->policy->lossy ? store->policy : NULL;
    const gck_codec *codec = frame->approximate && gck_plan_is_lossy(plan) ? plan->codec : NULL;

    for (int i = 0; codec == NULL && policy != NULL && i < policy->n; i++) {
        codec = gck_plan_is_lossy(&policy->named[i].plan) ? policy->named[i].plan.codec : NULL;
    }
    return codec != NULL && strcmp(codec->name, "bf16") == 0 ? NULL : codec;
}

int gck_samples_begin(gck_frame *frame, const gck_plan *plan)
{
    gck_state *state = frame->state;
    const gck_codec *codec = frame->fake_quantized ? NULL : codec_of(frame, plan);
    gck_kind *row = codec != NULL ? row_of(state, frame->function, codec) : NULL;

    if (row == NULL || row->looks < 0 || row->looks >= MOST_LOOKS || row->open || gck_runs_again()) {
        return PyErr_Occurred() ? -1 : 0;
    }
    row->looks++;
    row->open = 1;
    frame->kind = (int)(row - state->kinds);
    frame->samples = PyObject_CallFunction(state->py.call.saved_samples, "sOi", codec->name, frame->function,
                                           codec != plan->codec);
    return frame->samples != NULL ? 0 : -1;
}

/* The samples are taken by operators that no store and no mode sees. */
static int note(gck_frame *frame, const char *method, Py_ssize_t slot, PyObject *x)
{
    gck_state *state = frame->state;
    PyObject *samples, *modes;
    int status;

    if (!gck_is_plain_tensor(&state->py, x)) {
        return 0;
    }
    if (gck_hide_begin(state, &modes) < 0) {
        return -1;
    }
    samples = Py_NewRef(frame->samples);
    status = gck_done(PyObject_CallMethod(samples, method, "nO", slot, x));
    Py_DECREF(samples);
    return gck_hide_end(state, modes) < 0 ? -1 : status;
}

int gck_samples_saved(gck_frame *frame, Py_ssize_t slot, PyObject *x)
{
    return frame->samples == NULL || frame->phase != GCK_RECORDING ? 0 : note(frame, "note_saved", slot, x);
}

int gck_samples_restored(gck_frame *frame, Py_ssize_t slot, PyObject *x)
{
    return frame->samples == NULL || frame->exact ? 0 : note(frame, "note_restored", slot, x);
}

/* The samples are complete, or there is nothing to judge. */
static void close_kind(gck_frame *frame, int judged)
{
    gck_state *state = frame->state;

    if (frame->kind < state->nkinds) {
        state->kinds[frame->kind].open = 0;
        if (judged) {
            state->kinds[frame->kind].looks = -1;
        }
    }
    Py_CLEAR(frame->samples);
}

int gck_samples_returned(gck_frame *frame, PyObject *result)
{
    PyObject *samples = Py_XNewRef(frame->samples);
    int wanted = 0;

    if (samples == NULL) {
        return 0;
    }
    wanted = gck_is_true(PyObject_CallMethod(samples, "find_nodes", "OO", (PyObject *)frame, result));
    Py_DECREF(samples);
    if (wanted == 0) {
        close_kind(frame, 1);
    }
    return wanted < 0 ? -1 : 0;
}

int gck_samples_judge(gck_frame *frame)
{
    PyObject *samples = frame->samples, *modes;
    int status;

    if (samples == NULL || frame->exact) {
        return 0;
    }
    Py_INCREF(samples);
    close_kind(frame, 1);
    if (gck_hide_begin(frame->state, &modes) < 0) {
        Py_DECREF(samples);
        return -1;
    }
    status = gck_done(PyObject_CallMethod(samples, "judge", NULL));
    Py_DECREF(samples);
    return gck_hide_end(frame->state, modes) < 0 ? -1 : status;
}

void gck_samples_clear(gck_frame *frame)
{
    if (frame->samples != NULL) {
        close_kind(frame, 0);
    }
}
