/* exchanged.c: tensors without a node that changed places between the two runs of a region. */
#include "engine/region/exchanged.h"

#include "torch/calls.h"
#include "torch/input.h"
#include "engine/selective/op_hiding.h"

/* 1 when a constant was written since its origin was read: what it held then is not known; 0; -1. */
static int written_since(const gck_py *py, const gck_origin *of, PyObject *leaf)
{
    int64_t version = of->version;

    return of->constant && gck_version_of(py, leaf, &version) < 0 ? -1 : version != of->version;
}

/* 1 when these leaves cannot stand for one another; 0; -1. */
static int hold_other_values(gck_state *state, const gck_origin *was, const gck_origin *is, PyObject *then,
                             PyObject *now)
{
    const gck_py *py = &state->py;
    const int first = written_since(py, was, then), written = first == 0 ? written_since(py, is, now) : first;
    PyObject *modes;

    if (written != 0 || gck_hide_begin(state, &modes) < 0) {   /* the user's modes see none of what follows */
        return written > 0 ? 0 : -1;
    }
    const int may = gck_is_true(PyObject_CallFunction(py->call.may_change_places, "OO", then, now));
    return gck_hide_end(state, modes) < 0 || may < 0 ? -1 : !may;
}

/* 1 when both leaves are among those that this region has: the function's module owns them, or each was
 * met in both runs; 0; -1. */
static int are_of_region(const gck_frame *frame, const gck_origin *origins, Py_ssize_t n, PyObject *then, PyObject *now)
{
    int met_then = 0, met_now = 0;

    for (Py_ssize_t j = 0; j < n && !(met_then && met_now); j++) {
        met_then |= frame->slots[j].holder != NULL && gck_origin_leaf(&frame->slots[j].origin) == now;
        met_now |= gck_origin_leaf(&origins[j]) == then;
    }
    return met_then && met_now ? 1
         : gck_is_true(PyObject_CallFunction(frame->state->py.call.are_members, "OOO", frame->function, then, now));
}

int gck_leaf_is_exchanged(const gck_frame *frame, const gck_origin *origins, Py_ssize_t n, Py_ssize_t i)
{
    const gck_origin was = frame->slots[i].origin, *is = &origins[i];      /* Python may record more slots */
    GCK_SCOPED PyObject *then = Py_XNewRef(gck_origin_leaf(&was)), *now = Py_XNewRef(gck_origin_leaf(is));

    if (was.arguments != 0 || is->arguments != 0 || then == NULL || now == NULL) {
        return 0;
    }
    if (then == now) {
        return was.offset != is->offset && was.offset >= 0 && is->offset >= 0;
    }
    const int matters = are_of_region(frame, origins, n, then, now);
    return matters > 0 ? hold_other_values(frame->state, &was, is, then, now) : matters;
}
