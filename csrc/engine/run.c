/* run.c: what one run of a region's function knows while it runs. */
#include "engine/run.h"

static void give(gck_run *run, PyObject *x)
{
    if (PyTuple_Check(x)) {                      /* no other container owns its items for as long as the call runs */
        for (Py_ssize_t i = 0; i < PyTuple_Size(x); i++) {
            give(run, PyTuple_GetItem(x, i));
        }
    } else if (run->n < GCK_GIVEN) {
        run->given[run->n++] = x;
    }
}

void gck_run_of(gck_run *run, const Py_ssize_t *saved, PyObject *args, PyObject *kwargs)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;

    run->saved = saved;
    run->n = 0;
    give(run, args);
    while (kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value)) {
        give(run, value);
    }
}

int gck_argument_number(const gck_run *run, const PyObject *x)
{
    int found = GCK_NO_ARGUMENT;

    for (int i = 0; run != NULL && i < run->n; i++) {
        if (run->given[i] == x) {
            found = found == GCK_NO_ARGUMENT ? i : GCK_SOME_ARGUMENT;
        }
    }
    return found;
}
