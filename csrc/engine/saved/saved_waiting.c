/* saved_waiting.c: finds the node that saves a tensor.
 *
 * A pack hook is called while the node is being made.  Nothing refers to the node yet, but its
 * sequence number is known.  As soon as a later tensor is seen, the graph behind it is searched for
 * nodes of these numbers.  The number alone is not proof (an autograd Function may make nodes before it
 * saves): gradckpt._engine.saved_roles compares what the node holds with what the hook returned. */
#include "engine/saved/saved_waiting.h"

#include "engine/saved/saved_form.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    gck_saved_tensor *known[2 * GCK_WAITING_TENSORS]; /* borrowed, oldest first: a dying entry removes itself */
    int        n;
    int64_t    seen[GCK_WAITING_NODES];          /* numbers of nodes plus 1, at their remainder */
} list;

static const char capsule_name[] = "gradckpt.waiting";

static list *list_of(PyObject *waiting) { return PyCapsule_GetPointer(waiting, capsule_name); }

static void capsule_free(PyObject *capsule) { free(list_of(capsule)); }

PyObject *gck_saved_waiting_new(void)
{
    list *l = calloc(1, sizeof *l);
    PyObject *capsule = l != NULL ? PyCapsule_New(l, capsule_name, capsule_free) : PyErr_NoMemory();

    if (capsule == NULL) {
        free(l);
    }
    return capsule;
}

PyObject *gck_saved_waiting_of_thread(void)
{
    PyObject *thread = PyThreadState_GetDict();
    PyObject *capsule = thread != NULL ? PyDict_GetItemString(thread, capsule_name) : NULL;

    return capsule != NULL || thread == NULL ? Py_XNewRef(capsule)
                                             : gck_method(thread, "setdefault", Py_BuildValue("(sN)", capsule_name, gck_saved_waiting_new()));
}

gck_saved_tensor *gck_saved_waiting_known(PyObject *waiting, int index)
{
    list *l = list_of(waiting);

    return index < l->n ? l->known[index] : NULL;
}

void gck_saved_waiting_forget(gck_saved_tensor *saved)
{
    list *l = saved->waiting != NULL ? list_of(saved->waiting) : NULL;

    for (int i = 0; l != NULL && i < l->n; i++) {
        if (l->known[i] == saved) {
            memmove(&l->known[i], &l->known[i + 1], sizeof l->known[0] * (size_t)(--l->n - i));
        }
    }
    Py_CLEAR(saved->waiting);
}

/* Limit the list to the latest of those that wait and of those that do not.  number: of the latest.
 * 0 or -1. */
static int trim(list *l, int64_t number)
{
    int n[] = {0, 0};

    for (int i = l->n - 1; i >= 0; i--) {
        gck_saved_tensor *saved = l->known[i];
        const int waits = saved->saver != NULL, many = ++n[waits] >= GCK_WAITING_TENSORS;
        if (waits && (many || saved->number < number - GCK_WAITING_NODES)) {
            return gck_saved_form_settle(saved, NULL, 0) < 0 ? -1 : trim(l, number);      /* Python has run */
        }
        if (!waits && many) {
            gck_saved_waiting_forget(saved);
        }
    }
    return 0;
}

int gck_saved_waiting_add(PyObject *waiting, gck_saved_tensor *saved)
{
    list *l = list_of(waiting);

    if (trim(l, saved->number) < 0) {
        return -1;
    }
    saved->waiting = Py_NewRef(waiting);
    l->known[l->n++] = saved;
    return 0;
}

/* ---- the search ---- */

int64_t gck_last_node_number(const gck_py *py)
{
    PyObject *value = PyObject_CallNoArgs(py->next_node_number);
    const int64_t next = value != NULL ? PyLong_AsLongLong(value) : 0;

    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : next - 1;
}

/* The sequence number of a node; a number above all others for nodes without one; -1 with an
 * exception.  Numbers grow within a thread. */
static int64_t number_of(const gck_py *py, PyObject *node)
{
    PyObject *value = PyObject_CallMethodObjArgs(node, py->names._sequence_nr, NULL);
    const unsigned long long number = value != NULL ? PyLong_AsUnsignedLongLong(value) : 0;

    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : number > INT64_MAX ? INT64_MAX : (int64_t)number;
}

/* The number of the oldest tensor that waits; INT64_MAX: none waits. */
static int64_t oldest(const list *l)
{
    int64_t number = INT64_MAX;

    for (int i = l->n - 1; i >= 0; i--) {
        number = l->known[i]->saver != NULL ? l->known[i]->number : number;
    }
    return number;
}

/* Settle what the node of this number saves.  0 or -1. */
static int settle(list *l, PyObject *node, int64_t number)
{
    int status = 0;

    for (int i = 0; status == 0 && i < l->n; i++) {
        if (l->known[i]->saver != NULL && l->known[i]->number == number) {
            status = gck_saved_form_settle(l->known[i], node, 0);
            i = -1;                              /* Python has run: the list may have changed */
        }
    }
    return status;
}

/* As gck_saved_waiting_reach().  Numbers fall from step to step, so `depth` limits the nodes that are
 * being made now. */
static int search(list *l, const gck_py *py, PyObject *node, int64_t end, int depth)
{
    const int64_t number = number_of(py, node);
    int64_t *seen = &l->seen[number >= 0 ? number % GCK_WAITING_NODES : 0];
    PyObject *edges;
    int status = 0;

    if (number < 0 || number < oldest(l) || number == INT64_MAX || *seen == number + 1 || depth == 0) {
        return number < 0 ? -1 : 0;
    }
    if (number < end) {
        *seen = number + 1;
        status = settle(l, node, number);
    }
    edges = status == 0 ? PyObject_GetAttr(node, py->names.next_functions) : NULL;
    for (Py_ssize_t i = 0; edges != NULL && status == 0 && i < PyTuple_Size(edges); i++) {
        PyObject *next = PyTuple_GetItem(PyTuple_GetItem(edges, i), 0);
        status = next == Py_None ? 0 : search(l, py, next, end, depth - 1);
    }
    Py_XDECREF(edges);
    return edges == NULL ? -1 : status;
}

int gck_saved_waiting_reach(PyObject *waiting, gck_state *state, PyObject *node, int64_t end)
{
    list *l = list_of(waiting);
    const int tracing = oldest(l) < INT64_MAX ? gck_tracing(&state->py) : 1;

    /* Values cannot be read, or nothing waits. */
    return tracing < 0 ? -1 : tracing ? 0 : search(l, &state->py, node, end, 2 * GCK_WAITING_NODES);
}
