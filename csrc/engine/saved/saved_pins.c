/* saved_pins.c: holds some nodes of long chains, so that torch's recursion through them ends. */
#include "engine/saved/saved_pins.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "engine/saved/saved_node.h"

#include <stdlib.h>
#include <string.h>

enum { DEPTH = 64, RECENT = 1024, HELD = -1, FAILED = -2 };

/* Of the latest nodes of this thread, at the remainder of their number: how many nodes with objects lie on the
 * longest path to one that is held, or HELD: it is one. */
static _Thread_local struct { const PyObject *node; int64_t number; int below; } recent[RECENT];

static const char capsule_name[] = "gradckpt.held";

/* ---- letting go ---- */

/* Let go of nodes that nothing else holds, if what used one has been freed; newest first: each may be what held the one
 * before. */
static void sweep(gck_state *state)
{
    gck_pins *pins = &state->pins;

    if (!pins->due) {
        return;
    }
    pins->due = 0;
    /* what dies may run Python, which may come here again */
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();
    for (Py_ssize_t i = pins->n - 1; i >= 0; i = i < pins->n ? i - 1 : pins->n - 1) {
        PyObject *node = pins->held[i].node;
        if (Py_REFCNT(node) == 1) {
            memmove(&pins->held[i], &pins->held[i + 1], sizeof *pins->held * (size_t)(--pins->n - i));
            Py_DECREF(node);
        }
    }
}

static int sweep_later(void *state)
{
    sweep(state);
    return 0;
}

/* What used a held node is being freed: not now, for the stack is what it is. */
static void note(PyObject *capsule)
{
    gck_state *state = PyCapsule_GetPointer(capsule, capsule_name);
    GCK_SCOPED PyObject *type = PyCapsule_GetContext(capsule);

    if (state->pins.n > 0 && !state->pins.due) {
        state->pins.due = 1;
        Py_AddPendingCall(sweep_later, state);   /* without a place for it the next look lets go */
    }
}

/* ---- holding ---- */

static int hold(gck_state *state, PyObject *node, int64_t number)
{
    gck_pins *pins = &state->pins;
    Py_ssize_t i;

    for (i = pins->n; i > 0 && pins->held[i - 1].number >= number; i--) {
        if (pins->held[i - 1].node == node) {
            return 0;
        }
    }
    if (gck_make_room(&pins->held, pins->n, &pins->room, sizeof *pins->held) < 0) {
        return -1;
    }
    memmove(&pins->held[i + 1], &pins->held[i], sizeof *pins->held * (size_t)(pins->n++ - i));
    pins->held[i] = (struct gck_pin){Py_NewRef(node), number};
    return 0;
}

/* Have it noted when this node, which uses a held one, is freed.  0 or -1. */
static int tell_of(gck_state *state, PyObject *node)
{
    GCK_SCOPED PyObject *metadata = PyObject_GetAttrString(node, "metadata");
    GCK_SCOPED PyObject *capsule = metadata != NULL ? PyCapsule_New(state, capsule_name, note) : NULL;
    int status = capsule == NULL ? -1 : PyCapsule_SetContext(capsule, Py_NewRef((PyObject *)state->SavedTensor));

    return status < 0 ? -1 : PyMapping_SetItemString(metadata, capsule_name, capsule);
}

/* What `recent` says of this node, found out where it does not yet; FAILED.  What another node uses is held where it
 * is too far from the last that is, or older than what is remembered: what nothing uses could not be let go. */
static int below(gck_state *state, PyObject *node, int depth)
{
    const int64_t number = gck_node_number(&state->py, node);
    int most = 0, found;

    if (number < 0 || number == INT64_MAX) {
        return number < 0 ? FAILED : 0;
    }
    if (recent[number % RECENT].node == node && recent[number % RECENT].number == number) {
        return recent[number % RECENT].below;
    }
    if (depth == 0 || recent[number % RECENT].number > number) {
        return GCK_PIN_EVERY;
    }
    GCK_SCOPED PyObject *edges = PyObject_GetAttr(node, state->py.names.next_functions);
    for (Py_ssize_t i = 0; edges != NULL && most != FAILED && i < PyTuple_Size(edges); i++) {
        PyObject *next = PyTuple_GetItem(PyTuple_GetItem(edges, i), 0);
        found = next == Py_None ? 0 : below(state, next, depth - 1);
        if (found >= GCK_PIN_EVERY) {
            found = hold(state, next, gck_node_number(&state->py, next)) < 0 ? FAILED : HELD;
        }
        most = found == FAILED || (found == HELD && tell_of(state, node) < 0) ? FAILED
             : found + 1 > most ? found + 1 : most;
    }
    if (edges == NULL || most == FAILED) {
        return FAILED;
    }
    recent[number % RECENT].node = node;
    recent[number % RECENT].number = number;
    return recent[number % RECENT].below = most;
}

int gck_pins_looked(gck_state *state, PyObject *node)
{
    sweep(state);
    return ++state->looked < GCK_PIN_FROM || below(state, node, DEPTH) != FAILED ? 0 : -1;
}

/* ---- the module ---- */

void gck_pins_clear(gck_state *state)
{
    const gck_pins pins = state->pins;

    state->pins = (gck_pins){.held = NULL};
    for (Py_ssize_t i = 0; i < pins.n; i++) {
        Py_DECREF(pins.held[i].node);
    }
    free(pins.held);
}
