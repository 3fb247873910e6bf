/* rng.c: the CPU generator.
 *
 * Reading the state through torch costs about 3 us where caches are cold (5 KiB are
 * allocated, converted and copied), setting it 1 us, and a region does it four times a
 * step.  Most regions draw nothing.  So the bytes in which the generator keeps its state
 * are looked at in place: equal bytes mean no draw since torch gave us the state.
 * They are compared, never interpreted and never written; where they lie is found out at
 * import, by drawing from a generator of our own, and if torch ever moves them elsewhere
 * every state goes through torch again. */
#include "torch/rng.h"

#include "torch/calls.h"
#include "torch/simulated.h"

#include <string.h>
#include <unistd.h>

/* Set `latest` to state (a new reference is taken), provided the window has not moved since
 * `before` was copied from it: another thread may draw at any time. */
static void remember(gck_rng *rng, PyObject *state, const unsigned char *before)
{
    GCK_SCOPED PyObject *old = rng->latest;

    rng->latest = NULL;
    if (rng->window != NULL && memcmp(before, rng->window, GCK_RNG_WINDOW) == 0) {
        memcpy(rng->seen, before, GCK_RNG_WINDOW);
        rng->latest = Py_NewRef(state);
    }
}

static int is_latest(const gck_rng *rng)
{
    return rng->latest != NULL && memcmp(rng->seen, rng->window, GCK_RNG_WINDOW) == 0;
}

PyObject *gck_rng_stash(gck_rng *rng)
{
    unsigned char before[GCK_RNG_WINDOW];
    PyObject *state;

    if (is_latest(rng)) {                          /* faster */
        return Py_NewRef(rng->latest);
    }
    if (rng->window != NULL) {
        memcpy(before, rng->window, sizeof before);
    }
    state = PyObject_CallMethod(rng->generator, "get_state", NULL);
    if (state != NULL && gck_is_simulated()) {         /* of torch's two allocations, its mode sees this one */
        GCK_SCOPED PyObject *own = state;
        state = PyObject_CallMethod(own, "clone", NULL);
    }
    if (state != NULL) {
        remember(rng, state, before);
    }
    return state;
}

int gck_rng_set(gck_rng *rng, PyObject *state)
{
    unsigned char after[GCK_RNG_WINDOW];

    if (state == rng->latest && is_latest(rng)) {  /* faster */
        return 0;
    }
    if (gck_done(PyObject_CallMethod(rng->generator, "set_state", "O", state)) < 0) {
        return -1;
    }
    if (rng->window != NULL) {
        memcpy(after, rng->window, sizeof after);
        remember(rng, state, after);
    }
    return 0;
}

/* ---- for a while ---- */

/* Swaps that this thread is inside. */
static _Thread_local int depth;

/* A forked child has one thread. */
static void forget_other_threads(gck_rng *rng)
{
    if (rng->process != getpid()) {
        rng->process = getpid();
        rng->threads = depth > 0;
        if (depth == 0) {
            Py_CLEAR(rng->around);
        }
    }
}

int gck_rng_swap(gck_rng *rng, PyObject *state, PyObject **around)
{
    unsigned long long swaps;

    *around = NULL;
    do {
        swaps = rng->swaps;
        Py_XDECREF(*around);
        *around = gck_rng_stash(rng);
    } while (*around != NULL && swaps != rng->swaps);      /* torch let another thread run */
    if (*around == NULL) {
        return -1;
    }
    rng->swaps++;
    forget_other_threads(rng);
    if (depth++ == 0 && rng->threads++ == 0) {
        rng->around = Py_NewRef(*around);
    }
    return gck_rng_set(rng, state);
}

int gck_rng_swap_back(gck_rng *rng, PyObject **around)
{
    PyObject *state = *around;
    int status;

    *around = NULL;
    rng->swaps++;
    forget_other_threads(rng);
    if (--depth == 0) {
        Py_DECREF(state);
        if (--rng->threads > 0) {
            return 0;
        }
        state = rng->around;
        rng->around = NULL;
    }
    status = gck_rng_set(rng, state);
    if (rng->latest == state && Py_REFCNT(state) == 2) {
        Py_CLEAR(rng->latest);
    }
    Py_DECREF(state);
    return status;
}

/* ---- lifetime ---- */

int gck_rng_load(gck_rng *rng)
{
    GCK_SCOPED PyObject *objects = PyImport_ImportModule("gradckpt._engine.torch_objects");
    GCK_SCOPED PyObject *address = objects == NULL ? NULL
                   : PyObject_CallMethod(objects, "generator_window", "ii", GCK_RNG_BEFORE, GCK_RNG_WINDOW);

    rng->window = address != NULL ? PyLong_AsVoidPtr(address) : NULL;
    rng->generator = address != NULL && !PyErr_Occurred() ? PyObject_GetAttrString(objects, "default_generator") : NULL;
    return rng->generator == NULL ? -1 : 0;
}

int gck_rng_traverse(gck_rng *rng, visitproc visit, void *arg)
{
    Py_VISIT(rng->generator);
    Py_VISIT(rng->latest);
    Py_VISIT(rng->around);
    return 0;
}

void gck_rng_clear(gck_rng *rng)
{
    Py_CLEAR(rng->generator);
    Py_CLEAR(rng->latest);
    Py_CLEAR(rng->around);
}
