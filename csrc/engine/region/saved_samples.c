/* saved_samples.c: samples of what the first region of each kind saves, in both of its runs. */
#include "engine/region/saved_samples.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/simulated.h"
#include "torch/tensor.h"
#include "engine/selective/op_hiding.h"

enum { MOST_LOOKS = 4 };           /* regions of a kind that died unjudged, as in evaluation, before it is given up */

/* ---- kinds ---- */

/* What tells kinds apart.  New references: the class and the code of a method, the code of a function, or
 * the class of anything else that is called.  0 or -1. */
static int kind_of(const gck_py *py, PyObject *function, gck_kind *kind)
{
    GCK_SCOPED PyObject *f = Py_NewRef(function), *self = NULL;

    while (f != NULL && (PyObject *)Py_TYPE(f) == py->partial) {
        GCK_SCOPED PyObject *around = f;
        f = PyObject_GetAttr(around, py->names.func);
    }
    if (f == NULL) {
        return -1;
    }
    if ((PyObject *)Py_TYPE(f) == py->FunctionType) {
        kind->of = PyObject_GetAttr(f, py->names.__code__);
    } else if ((PyObject *)Py_TYPE(f) == py->MethodType) {
        self = PyObject_GetAttr(f, py->names.__self__);
        kind->of = self != NULL ? Py_NewRef((PyObject *)Py_TYPE(self)) : NULL;
        kind->method = self != NULL ? gck_optional_attribute(f, py->names.__code__) : NULL;    /* of its function */
    } else {
        kind->of = Py_NewRef((PyObject *)Py_TYPE(f));
    }
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
    GCK_CLEARED_BY(clear_kind) gck_kind kind = {.codec = codec};
    gck_kind *row = NULL;

    if (kind_of(&state->py, function, &kind) < 0) {
        return NULL;
    }
    for (int i = state->kinds_from; row == NULL && i < state->nkinds; i++) {
        gck_kind *at = &state->kinds[i];
        row = at->of == kind.of && at->method == kind.method && at->codec == codec ? at : NULL;
    }
    if (row == NULL && state->nkinds < GCK_NKINDS) {
        row = &state->kinds[state->nkinds++];
        *row = kind;
        kind = (gck_kind){.codec = codec};
    }
    return row;
}

PyObject *gck_sample_anew(PyObject *module, PyObject *on)
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
        GCK_CLEARED_BY(clear_kind) gck_kind dropped = state->kinds[--state->nkinds];
    }
    state->kinds_from = (int)before;
    Py_RETURN_NONE;
}

/* ---- samples ---- */

int gck_samples_begin(gck_samples *s, PyObject *function, const gck_codec *codec, int of_policy)
{
    gck_kind *row = gck_is_simulated() ? NULL : row_of(s->state, function, codec);    /* it has no values */

    if (row == NULL || row->looks < 0 || row->looks >= MOST_LOOKS || row->open) {
        return PyErr_Occurred() ? -1 : 0;
    }
    row->looks++;
    row->open = 1;
    s->kind = (int)(row - s->state->kinds);
    s->taken = PyObject_CallFunction(s->state->py.call.saved_samples, "sOi", codec->name, function, of_policy);
    if (s->taken == NULL) {
        row->open = 0;
    }
    return s->taken != NULL ? 0 : -1;
}

/* Call a method with its arguments, taken over, by operators that no store and no mode sees.  Its truth, or -1. */
static int call_hidden(gck_samples *s, const char *method, PyObject *args)
{
    GCK_SCOPED PyObject *taken = Py_NewRef(s->taken);
    PyObject *modes;

    if (gck_hide_begin(s->state, &modes) < 0) {
        Py_XDECREF(args);
        return -1;
    }
    const int truth = gck_is_true(gck_method(taken, method, args));
    return gck_hide_end(s->state, modes) < 0 ? -1 : truth;
}

int gck_samples_note(gck_samples *s, const char *method, Py_ssize_t slot, PyObject *x)
{
    return s->taken == NULL || !gck_is_plain_tensor(&s->state->py, x)
        ? 0 : call_hidden(s, method, Py_BuildValue("(nO)", slot, x));
}

/* End the samples of a kind; if it is not judged, another region of the kind takes some.  The index may be of a
 * kind that was forgotten since. */
static void close_kind(gck_samples *s, int judged)
{
    gck_state *state = s->state;

    if (s->kind < state->nkinds) {
        state->kinds[s->kind].open = 0;
        if (judged) {
            state->kinds[s->kind].looks = -1;
        }
    }
    Py_CLEAR(s->taken);
}

int gck_samples_returned(gck_samples *s, PyObject *frame, PyObject *result, int64_t nodes)
{
    const int wanted = s->taken == NULL
        ? 1 : call_hidden(s, "find_nodes", Py_BuildValue("(OOL)", frame, result, (long long)nodes));

    if (wanted == 0) {
        close_kind(s, 1);
    }
    return wanted < 0 ? -1 : 0;
}

int gck_samples_decide(gck_samples *s)
{
    GCK_SCOPED PyObject *taken = Py_XNewRef(s->taken);
    gck_samples mine = *s;

    if (taken == NULL) {
        return 0;
    }
    close_kind(s, 1);
    return call_hidden(&mine, "judge", PyTuple_New(0));
}

void gck_samples_clear(gck_samples *s)
{
    if (s->taken != NULL) {
        close_kind(s, 0);
    }
}
