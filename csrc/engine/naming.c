/* naming.c: outputs that get a name after their operator has run: gradckpt.name(). */
#include "store.h"

int gck_store_candidate(gck_store *store, int line, PyObject *index, PyObject *out)
{
    /* Until it gets a name it is run again. */
    PyObject *found = gck_store_skip(store, store->lines[line].calls, index) == 0
        ? PyObject_CallMethod(store->state->py.selection, "candidate", "(O)", out) : NULL;
    PyObject *row = found != NULL ? Py_BuildValue("(NiO)", found, line, index) : NULL;
    int status = -1;

    if (row != NULL && (store->candidates != NULL || (store->candidates = PyList_New(0)) != NULL)) {
        status = PyList_Append(store->candidates, row);
    }
    Py_XDECREF(row);
    return status;
}

/* x has the name: what it was made from is kept. */
static int keep_candidate(gck_store *store, PyObject *x, PyObject *name)
{
    PyObject *found = PyObject_CallMethod(store->state->py.selection, "find_candidate", "OOO",
                                          store->candidates != NULL ? store->candidates : Py_None, x, name);
    PyObject *out, *index;
    int line, status = -1;

    if (found != NULL && PyArg_ParseTuple(found, "OiO", &out, &line, &index)) {
        status = gck_store_keep(store, store->lines[line].calls, index, out, &store->policy->named[line].plan);
        store->met++;
    }
    Py_XDECREF(found);
    return status;
}

int gck_store_name(gck_store *store, PyObject *x, PyObject *name)
{
    const int wanted = store->policy != NULL ? PySet_Contains(store->policy->wanted, name) : 0;

    return wanted > 0 ? keep_candidate(store, x, name) : wanted;
}

int gck_store_finish(gck_store *store)
{
    PyObject *warned;

    if (store->policy == NULL || PySet_Size(store->policy->wanted) == 0) {
        return 0;
    }
    Py_CLEAR(store->candidates);
    if (store->met > 0) {
        return 0;
    }
    warned = PyObject_CallMethod(store->state->py.selection, "warn_unnamed", "OO", (PyObject *)store->policy,
                                 store->policy->wanted);
    Py_XDECREF(warned);
    return warned == NULL ? -1 : 0;
}
