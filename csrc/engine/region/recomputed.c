/* recomputed.c: the recomputed tensors of a frame, one table per backward.  A table ends when all
 * its tensors were handed out, when its graph task is over, or with the frame. */
#include "engine/region/recomputed.h"

#include "torch/calls.h"
#include "torch/error.h"

#include <stdlib.h>
#include <string.h>

/* Limits where the end of a backward is unknown, in a GraphExecGroup. */
enum {
    KEEP_DRAINED = 8,   /* drained tables remembered, to tell "unpacked once" from "never"        */
    KEEP_FILLED = 4,    /* backwards that left values behind: more than can interleave on a frame */
};

/* ---- frames that have tables: a list in the state ---- */

static void unlist(const gck_recomputed_tables *tables)
{
    gck_recomputed_tables **link = &tables->state->with_recomputed;

    while (*link != tables) {                    /* soon: the latest come first, and end first */
        link = &(*link)->next;
    }
    *link = tables->next;
}

/* ---- tables ---- */

gck_recomputed *gck_recomputed_find(gck_recomputed_tables *tables, int64_t task, PyObject *group)
{
    for (Py_ssize_t i = tables->n - 1; i >= 0; i--) {
        gck_recomputed *t = tables->table[i];
        if (group != NULL ? t->group == group : t->group == NULL && t->task == task) {
            return t;
        }
    }
    return NULL;
}

/* ---- waiting for another thread's recompute ---- */

void gck_recomputed_open(gck_recomputed *table)
{
    GCK_SCOPED PyObject *gate = table->gate;

    table->gate = NULL;
    if (gate != NULL) {
        GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();
        Py_XDECREF(PyObject_CallMethod(gate, "release", NULL));
    }
}

/* The first thread that waits makes the gate and locks it.  No call here runs Python: the methods
 * of a lock are C. */
int gck_recomputed_wait(const gck_py *py, gck_recomputed *table)
{
    table->gate = table->gate != NULL ? table->gate : PyObject_CallNoArgs(py->new_lock);
    GCK_SCOPED PyObject *gate = Py_XNewRef(table->gate);       /* the table may be freed before this thread wakes up */

    return gate == NULL || gck_done(PyObject_CallMethod(gate, "acquire", "O", Py_False)) < 0
        || gck_done(PyObject_CallMethod(gate, "acquire", NULL)) < 0
        ? -1 : gck_done(PyObject_CallMethod(gate, "release", NULL));         /* for the next thread that waits */
}

static void table_free(gck_recomputed *table)
{
    gck_recomputed_open(table);
    gck_recomputed_drain(table);
    Py_XDECREF(table->group);
    free(table->slots);
    free(table);
}

void gck_recomputed_free(gck_recomputed_tables *tables, gck_recomputed *table)
{
    for (Py_ssize_t i = 0; i < tables->n; i++) {
        if (tables->table[i] == table) {
            memmove(&tables->table[i], &tables->table[i + 1],
                    (size_t)(tables->n - i - 1) * sizeof *tables->table);
            if (--tables->n == 0) {
                unlist(tables);
            }
            table_free(table);
            return;
        }
    }
}

void gck_recomputed_clear(gck_recomputed_tables *tables)
{
    while (tables->n > 0) {                 /* freeing one may free others */
        gck_recomputed_free(tables, tables->table[0]);
    }
}

/* Free the oldest tables, whose backwards are over.  If one were not, it would recompute. */
static void forget_old(gck_recomputed_tables *tables)
{
    Py_ssize_t drained = 0, filled = 0;

    for (Py_ssize_t i = tables->n - 1; i >= 0; i--) {
        const gck_recomputed *t = tables->table[i];
        if (!t->watched && ((t->phase == GCK_DRAINED && ++drained > KEEP_DRAINED)
            || (t->phase == GCK_FILLED && t->group == NULL && ++filled > KEEP_FILLED))) {
            gck_recomputed_free(tables, tables->table[i]);
            i = i < tables->n ? i : tables->n;     /* freeing may have freed others */
        }
    }
}

/* ---- the end of a graph task ---- */

/* Borrowed: a table of this task, with those beside it; NULL when none exists.  A table that is
 * being filled belongs to its recompute, and is freed by its number afterwards. */
static gck_recomputed *table_of_task(gck_state *state, int64_t task, gck_recomputed_tables **tables)
{
    for (*tables = state->with_recomputed; *tables != NULL; *tables = (*tables)->next) {
        gck_recomputed *table = gck_recomputed_find(*tables, task, NULL);
        if (table != NULL && table->phase != GCK_RESTORING) {
            return table;
        }
        if (table != NULL) {
            table->watched = 0;
        }
    }
    return NULL;
}

/* The object bound to the engine's callback.  It dies with the graph task, also when that raised
 * and the callback itself was never called. */
enum { NO_TASK = -1 };
typedef struct {
    gck_state    *state;
    PyTypeObject *keeper;          /* owned: keeps the module, and so the state, alive   */
    int64_t       task;
} task_end;

static void end_task(PyObject *capsule)
{
    task_end *end = PyCapsule_GetPointer(capsule, NULL);
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();
    gck_recomputed_tables *tables;
    gck_recomputed *table;

    /* Freeing values may run any code, so every round starts at the head of the list. */
    while ((table = table_of_task(end->state, end->task, &tables)) != NULL) {
        gck_recomputed_free(tables, table);
    }
    if (end->state->watched_task == end->task) {
        end->state->watched_task = -1;
    }
    Py_DECREF(end->keeper);
    free(end);
}

static PyObject *nothing(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    Py_RETURN_NONE;
}

static PyMethodDef nothing_def = {"end_of_graph_task", nothing, METH_NOARGS, NULL};

/* New reference: a capsule whose death ends the task. */
static PyObject *task_capsule(gck_state *state, int64_t task)
{
    task_end *end = malloc(sizeof *end);
    PyObject *capsule;

    if (end == NULL) {
        return PyErr_NoMemory();
    }
    *end = (task_end){state, (PyTypeObject *)Py_NewRef((PyObject *)state->Frame), task};
    capsule = PyCapsule_New(end, NULL, end_task);
    if (capsule == NULL) {
        Py_DECREF(end->keeper);
        free(end);
    }
    return capsule;
}

/* 1 when the tables of this task will be freed at its end, by one callback per task.  0 when the
 * engine accepts no callback: then old tables are freed by their number. -1 with an exception. */
static int watch_task(gck_state *state, int64_t task)
{
    if (state->watched_task == task) {
        return 1;
    }
    GCK_SCOPED PyObject *capsule = task_capsule(state, task), *result = NULL;
    GCK_SCOPED PyObject *callback = capsule != NULL ? PyCFunction_New(&nothing_def, capsule) : NULL;
    if (callback != NULL && (result = PyObject_CallFunctionObjArgs(state->py.queue_callback, callback, NULL)) != NULL) {
        state->watched_task = task;
    } else if (capsule != NULL) {
        ((task_end *)PyCapsule_GetPointer(capsule, NULL))->task = NO_TASK;      /* its death means nothing */
    }
    return result != NULL ? 1 : gck_clear_refusal();
}

gck_recomputed *gck_recomputed_new(gck_recomputed_tables *tables, Py_ssize_t size, int64_t task, PyObject *group)
{
    gck_recomputed *table = calloc(1, sizeof *table);
    gck_recomputed **grown = realloc(tables->table, (size_t)(tables->n + 1) * sizeof *grown);

    if (grown != NULL) {
        tables->table = grown;
    }
    if (table == NULL || grown == NULL
        || (table->slots = calloc((size_t)size + 1, sizeof *table->slots)) == NULL) {
        free(table);
        PyErr_NoMemory();
        return NULL;
    }
    table->size = size;                          /* more may come, from a backward inside the region */
    table->task = task;
    table->group = Py_XNewRef(group);
    table->phase = GCK_RESTORING;
    table->thread = PyThread_get_thread_ident();
    if (tables->n == 0) {
        tables->next = tables->state->with_recomputed;
        tables->state->with_recomputed = tables;
    }
    tables->table[tables->n++] = table;
    table->watched = group == NULL && task >= 0 ? watch_task(tables->state, task) : 0;
    if (table->watched < 0) {
        gck_recomputed_free(tables, table);
        return NULL;
    }
    forget_old(tables);
    return table;
}

void gck_recomputed_drain(gck_recomputed *table)
{
    table->phase = GCK_DRAINED;
    table->left = 0;
    for (Py_ssize_t i = 0; i < table->size; i++) {
        Py_CLEAR(table->slots[i].value);
    }
}
