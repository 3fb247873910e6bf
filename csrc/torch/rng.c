/* rng.c: the CPU generator.
 *
 * Reading the state through torch costs about 3 us where caches are cold (5 KiB are
 * allocated, converted and copied), setting it 1 us, and a region does it four times a
 * step.  Most regions draw nothing.  So the bytes in which the generator keeps its state
 * are looked at in place: equal bytes mean that nobody drew since torch gave us the state.
 * They are compared, never interpreted and never written; where they lie is found out at
 * import, by drawing from a generator of our own, and if torch ever moves them elsewhere
 * every state goes through torch again. */
#include "rng.h"

#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MAX_OFFSET = 256, LEGACY_WORDS = 24 };      /* get_state(): words as uint64 from byte 24 */

/* ---- where the state lies ---- */

/* memcpy that fails instead of faulting. */
static int read_safely(void *to, uintptr_t from, size_t nbytes)
{
    struct iovec local = {to, nbytes}, remote = {(void *)from, nbytes};

    return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == (ssize_t)nbytes ? 0 : -1;
}

/* The address of the generator object, 0 when torch does not tell. */
static uintptr_t address_of(PyObject *generator)
{
    PyObject *value = PyObject_GetAttrString(generator, "_cdata");
    const uintptr_t address = value != NULL ? (uintptr_t)PyLong_AsVoidPtr(value) : 0;

    Py_XDECREF(value);
    PyErr_Clear();
    return address;
}

/* The twister's words as torch gives them.  0 or -1. */
static int official_words(PyObject *generator, uint32_t *words)
{
    PyObject *state = PyObject_CallMethod(generator, "get_state", NULL);
    PyObject *array = state != NULL ? PyObject_CallMethod(state, "tolist", NULL) : NULL;
    int status = -1;

    if (array != NULL && PyList_Size(array) >= LEGACY_WORDS + 8 * GCK_RNG_WORDS) {
        for (int i = 0; i < GCK_RNG_WORDS; i++) {
            words[i] = 0;
            for (int byte = 0; byte < 4; byte++) {
                PyObject *value = PyList_GetItem(array, LEGACY_WORDS + 8 * i + byte);
                words[i] |= (uint32_t)PyLong_AsLong(value) << 8 * byte;
            }
        }
        status = 0;
    }
    Py_XDECREF(state);
    Py_XDECREF(array);
    PyErr_Clear();
    return status;
}

/* Offset of the words in the generator object, or -1. */
static int find_words(PyObject *generator)
{
    const uintptr_t address = address_of(generator);
    uint32_t words[GCK_RNG_WORDS];
    unsigned char bytes[sizeof words];

    if (address == 0 || official_words(generator, words) < 0) {
        return -1;
    }
    for (int offset = GCK_RNG_BEFORE; offset <= MAX_OFFSET; offset += 4) {
        if (read_safely(bytes, address + (uintptr_t)offset, sizeof bytes) < 0) {
            return -1;
        }
        if (memcmp(bytes, words, sizeof bytes) == 0) {
            return offset;
        }
    }
    return -1;
}

/* Every way to draw must show in the window, and nothing else may.  1 or 0. */
static int window_tells(PyObject *torch, PyObject *generator, uintptr_t window)
{
    static const struct { const char *function; long n; } draws[] = {
        {"rand", 1}, {"randn", 1}, {"randn", 1}, {"randperm", 3}, {"rand", 1000}, {"randn", 40}, {"randn", 3},
    };
    unsigned char before[GCK_RNG_WINDOW], after[GCK_RNG_WINDOW];
    int tells = read_safely(before, window, sizeof before) == 0;

    for (size_t i = 0; tells && i < sizeof draws / sizeof draws[0]; i++) {
        for (int draw = 0; tells && draw < 2; draw++) {
            PyObject *function = PyObject_GetAttrString(torch, draws[i].function);
            PyObject *args = Py_BuildValue("(l)", draws[i].n), *kwargs = Py_BuildValue("{sO}", "generator", generator);
            PyObject *result = !draw ? PyObject_CallMethod(generator, "get_state", NULL)
                             : function && args && kwargs ? PyObject_Call(function, args, kwargs) : NULL;
            tells = result != NULL && read_safely(after, window, sizeof after) == 0
                && (memcmp(before, after, sizeof after) != 0) == draw;
            memcpy(before, after, sizeof before);
            Py_XDECREF(function);
            Py_XDECREF(args);
            Py_XDECREF(kwargs);
            Py_XDECREF(result);
        }
    }
    PyErr_Clear();
    return tells;
}

static void find_window(gck_rng *rng, PyObject *torch)
{
    PyObject *own = PyObject_CallMethod(torch, "Generator", NULL);
    const int offset = own != NULL ? find_words(own) : -1;

    PyErr_Clear();
    if (offset >= 0 && window_tells(torch, own, address_of(own) + (uintptr_t)(offset - GCK_RNG_BEFORE))
        && find_words(rng->generator) == offset) {
        rng->window = (const unsigned char *)(address_of(rng->generator) + (uintptr_t)(offset - GCK_RNG_BEFORE));
    }
    Py_XDECREF(own);
}

/* ---- stash and put ---- */

/* `latest` := state (a new reference is taken), provided the window did not move since
 * `before` was copied from it: another thread may draw at any time. */
static void remember(gck_rng *rng, PyObject *state, const unsigned char *before)
{
    PyObject *old = rng->latest;

    rng->latest = NULL;
    if (rng->window != NULL && memcmp(before, rng->window, GCK_RNG_WINDOW) == 0) {
        memcpy(rng->seen, before, GCK_RNG_WINDOW);
        rng->latest = Py_NewRef(state);
    }
    Py_XDECREF(old);
}

static int is_latest(const gck_rng *rng)
{
    return rng->latest != NULL && memcmp(rng->seen, rng->window, GCK_RNG_WINDOW) == 0;
}

PyObject *gck_rng_stash(gck_rng *rng)
{
    unsigned char before[GCK_RNG_WINDOW];
    PyObject *state;

    if (is_latest(rng)) {
        return Py_NewRef(rng->latest);
    }
    if (rng->window != NULL) {
        memcpy(before, rng->window, sizeof before);
    }
    state = PyObject_CallMethodObjArgs(rng->generator, rng->get_state, NULL);
    if (state != NULL) {
        remember(rng, state, before);
    }
    return state;
}

int gck_rng_put(gck_rng *rng, PyObject *state)
{
    unsigned char after[GCK_RNG_WINDOW];
    PyObject *result;

    if (state == rng->latest && is_latest(rng)) {
        return 0;
    }
    result = PyObject_CallMethodObjArgs(rng->generator, rng->set_state, state, NULL);
    if (result == NULL) {
        return -1;
    }
    Py_DECREF(result);
    if (rng->window != NULL) {
        memcpy(after, rng->window, sizeof after);
        remember(rng, state, after);
    }
    return 0;
}

/* ---- lifetime ---- */

int gck_rng_load(gck_rng *rng)
{
    PyObject *torch = PyImport_ImportModule("torch");

    rng->generator = torch != NULL ? PyObject_GetAttrString(torch, "default_generator") : NULL;
    rng->get_state = PyUnicode_InternFromString("get_state");
    rng->set_state = PyUnicode_InternFromString("set_state");
    if (rng->generator != NULL) {
        find_window(rng, torch);
    }
    Py_XDECREF(torch);
    return rng->generator == NULL || rng->get_state == NULL || rng->set_state == NULL ? -1 : 0;
}

int gck_rng_traverse(gck_rng *rng, visitproc visit, void *arg)
{
    Py_VISIT(rng->generator);
    Py_VISIT(rng->latest);
    return 0;
}

void gck_rng_clear(gck_rng *rng)
{
    Py_CLEAR(rng->generator);
    Py_CLEAR(rng->get_state);
    Py_CLEAR(rng->set_state);
    Py_CLEAR(rng->latest);
}
