/* op_labels.c: outputs that get a name after their operator has run: gradckpt.policies.name(). */
#include "engine/selective/op_labels.h"

#include "torch/calls.h"
#include "engine/selective/op_mixing.h"
#include "engine/selective/op_outputs.h"
#include "engine/selective/op_written.h"

int gck_op_label_candidate(gck_op_storage *store, int line, Py_ssize_t index, PyObject *out)
{
    if (store->candidates == NULL && (store->candidates = PyList_New(0)) == NULL) {
        return -1;
    }
    return gck_append(store->candidates,
                      PyObject_CallFunction(store->state->py.call.candidate, "Oin", out, line, index));
}

/* x has the name: keep the output that it comes from. */
static int keep_candidate(gck_op_storage *store, PyObject *x, PyObject *name)
{
    GCK_SCOPED PyObject *found = PyObject_CallFunction(store->state->py.call.find_candidate, "OOO",
                                                     store->candidates != NULL ? store->candidates : Py_None, x, name);
    PyObject *out;
    Py_ssize_t index;
    int line, status = -1;

    if (found != NULL && PyArg_ParseTuple(found, "Oin", &out, &line, &index)) {
        const gck_op_rule *rule = &store->policy->named[line];
        status = out == Py_None ? 0              /* written into unseen: it runs again */
            : gck_op_mixes(store, rule) ? gck_op_runs_again(&store->state->py, rule->op)
            : gck_op_storage_keep(store, index, gck_op_output_keep(store, out, &rule->plan));
        store->met++;
    }
    return status;
}

int gck_op_label(gck_op_storage *store, PyObject *x, PyObject *name)
{
    const int wanted = store->policy != NULL ? PySet_Contains(store->policy->wanted, name) : 0;

    return wanted > 0 ? keep_candidate(store, x, name) : wanted;
}

int gck_op_labels_finish(gck_op_storage *store)
{
    if (gck_settle_outputs(store) < 0) {
        return -1;
    }
    if (store->policy == NULL || PySet_Size(store->policy->wanted) == 0) {
        return 0;
    }
    Py_CLEAR(store->candidates);
    return store->met > 0 ? 0 : gck_done(PyObject_CallFunction(store->state->py.call.warn_unnamed, "O",
                                                             store->policy->wanted));
}
