/* waiting.c: finds the node that saves a tensor.
 *
 * A pack hook is called while the node is being made: nothing refers to the node yet, but its
 * sequence number is known.  As soon as a later tensor is seen, the graph behind it is searched for
 * nodes of these numbers.  The number alone proves nothing (an autograd Function may make nodes
 * before it saves): role.c compares what the node holds with what the hook gave. */
#include "waiting.h"

#include <stdlib.h>
#include <string.h>

enum { STACK = 256 };                  /* nodes yet to be looked at */

typedef struct {
    gck_saved *tensors[GCK_WAITING_TENSORS];     /* borrowed, oldest first: a dying one leaves by itself */
    int        n;
    gck_saved *settled[GCK_WAITING_TENSORS];     /* likewise, a ring                     */
    int        next;
    int64_t    number, widest;                   /* of the node that saved last          */
    int64_t    seen[GCK_WAITING_NODES];          /* numbers of nodes, and 1, at their remainder */
} list;

static const char capsule_name[] = "gradckpt.waiting";

static list *list_of(PyObject *waiting) { return PyCapsule_GetPointer(waiting, capsule_name); }

static void capsule_free(PyObject *capsule) { free(list_of(capsule)); }

PyObject *gck_waiting_new(void)
{
    list *l = calloc(1, sizeof *l);
    PyObject *capsule = l != NULL ? PyCapsule_New(l, capsule_name, capsule_free) : PyErr_NoMemory();

    if (capsule == NULL) {
        free(l);
    }
    return capsule;
}

PyObject *gck_waiting_of_thread(void)
{
    PyObject *thread = PyThreadState_GetDict();
    PyObject *capsule = thread != NULL ? PyDict_GetItemString(thread, capsule_name) : NULL;

    if (capsule != NULL) {
        return Py_NewRef(capsule);
    }
    capsule = gck_waiting_new();
    if (capsule != NULL && thread != NULL && PyDict_SetItemString(thread, capsule_name, capsule) < 0) {
        Py_CLEAR(capsule);
    }
    return capsule;
}

void gck_waiting_note(PyObject *waiting, int64_t number, int64_t numel)
{
    list *l = list_of(waiting);

    l->widest = l->number == number && l->widest > numel ? l->widest : numel;
    l->number = number;
    for (int i = l->n - 1; i >= 0 && l->tensors[i]->number == number; i--) {
        l->tensors[i]->widest = l->widest;
    }
}

/* The one at `i` waits no longer.  0 or -1. */
static int settle_at(list *l, int i, gck_settle *settle)
{
    gck_saved *saved = (gck_saved *)Py_NewRef((PyObject *)l->tensors[i]);
    PyObject *waiting = saved->waiting, *node = saved->node;
    int status;

    memmove(&l->tensors[i], &l->tensors[i + 1], sizeof l->tensors[0] * (size_t)(--l->n - i));
    saved->waiting = saved->node = NULL;
    status = settle != NULL ? settle(saved, node) : 0;   /* after an error: as it is */
    Py_XDECREF(node);
    Py_DECREF((PyObject *)saved);
    Py_DECREF(waiting);
    return status;
}

/* Settle those of whom the node is known, or those of `saver`, in the order in which they came.  0 or -1. */
static int settle_all(list *l, const PyObject *saver, gck_settle *settle)
{
    int status = 0;

    for (int i = 0; i < l->n; i++) {
        if (saver != NULL ? l->tensors[i]->saver == saver : l->tensors[i]->node != NULL) {
            status = settle_at(l, i, status < 0 ? NULL : settle) < 0 ? -1 : status;
            i = -1;                              /* settling ran Python: the list may be another */
        }
    }
    return status;
}

int gck_waiting_add(PyObject *waiting, gck_saved *saved, gck_settle *settle)
{
    list *l = list_of(waiting);

    while (l->n == GCK_WAITING_TENSORS || (l->n > 0 && l->tensors[0]->number < saved->number - GCK_WAITING_NODES)) {
        if (settle_at(l, 0, settle) < 0) {
            return -1;
        }
    }
    saved->widest = l->widest;
    saved->waiting = Py_NewRef(waiting);
    l->tensors[l->n++] = saved;
    return 0;
}

void gck_waiting_remember(PyObject *waiting, gck_saved *saved)
{
    list *l = list_of(waiting);
    gck_saved *old = l->settled[l->next];

    l->settled[l->next] = saved;
    l->next = (l->next + 1) % GCK_WAITING_TENSORS;
    saved->waiting = Py_NewRef(waiting);
    if (old != NULL) {
        Py_CLEAR(old->waiting);
    }
}

gck_saved *gck_waiting_next(PyObject *waiting, int index)
{
    list *l = list_of(waiting);

    return index < l->n ? l->tensors[index] : NULL;
}

gck_saved *gck_waiting_settled(PyObject *waiting, int index) { return list_of(waiting)->settled[index]; }

void gck_waiting_forget(gck_saved *saved)
{
    list *l = list_of(saved->waiting);

    for (int i = 0; i < GCK_WAITING_TENSORS; i++) {
        if (l->settled[i] == saved) {
            l->settled[i] = NULL;
        }
        if (i < l->n && l->tensors[i] == saved) {
            memmove(&l->tensors[i], &l->tensors[i + 1], sizeof l->tensors[0] * (size_t)(--l->n - i));
        }
    }
    Py_CLEAR(saved->waiting);
}

/* The nodes behind `node` come onto the stack.  0 or -1. */
static int push_inputs(const gck_py *py, PyObject *node, PyObject **stack, int *depth)
{
    PyObject *edges = PyObject_GetAttr(node, py->names.next_functions);
    const Py_ssize_t n = edges != NULL && PyTuple_Check(edges) ? PyTuple_Size(edges) : 0;

    for (Py_ssize_t i = 0; i < n && *depth < STACK; i++) {
        PyObject *next = PyTuple_GetItem(PyTuple_GetItem(edges, i), 0);     /* borrowed */
        if (next != NULL && next != Py_None) {
            stack[(*depth)++] = Py_NewRef(next);
        }
    }
    Py_XDECREF(edges);
    return edges == NULL ? -1 : 0;
}

/* Tell those that wait for this node, and say whether to go on behind it: 1, 0, -1. */
static int visit(list *l, const gck_py *py, PyObject *node, int64_t end)
{
    const int64_t number = gck_node_number(py, node);
    int64_t *seen = &l->seen[number >= 0 ? number % GCK_WAITING_NODES : 0];

    if (number < 0) {
        return -1;
    }
    if (l->n == 0 || number < l->tensors[0]->number || number == INT64_MAX || *seen == number + 1) {
        return 0;
    }
    if (number >= end) {
        return 1;
    }
    *seen = number + 1;
    for (int i = 0; i < l->n; i++) {
        if (l->tensors[i]->number == number && l->tensors[i]->node == NULL) {
            l->tensors[i]->node = Py_NewRef(node);
        }
    }
    return 1;
}

int gck_waiting_reach(PyObject *waiting, gck_state *state, PyObject *node, int64_t end, gck_settle *settle)
{
    list *l = list_of(waiting);
    PyObject *stack[STACK];
    int depth = 0, status = l->n > 0 ? gck_tracing(&state->py) : 1;

    if (status != 0) {                           /* no values can be read, or nothing waits */
        return status < 0 ? -1 : 0;
    }
    stack[depth++] = Py_NewRef(node);
    while (depth > 0) {
        PyObject *next = stack[--depth];
        if (status >= 0 && (status = visit(l, &state->py, next, end)) > 0) {
            status = push_inputs(&state->py, next, stack, &depth);
        }
        Py_DECREF(next);
    }
    return status < 0 ? -1 : settle_all(l, NULL, settle);
}

int gck_waiting_end(PyObject *waiting, const PyObject *saver, gck_settle *settle)
{
    return settle_all(list_of(waiting), saver, settle);
}
