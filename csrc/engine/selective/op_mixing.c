/* op_mixing.c: which kept outputs would be mixed with restored values. */
#include "engine/selective/op_mixing.h"

#include "torch/calls.h"
#include "torch/objects.h"
#include "engine/checkpoint_options.h"
#include "engine/selective/op_outputs.h"

int gck_op_mixing_of(const gck_py *py, PyObject *op)
{
    return (int)gck_as_int64(PyObject_CallFunctionObjArgs(py->call.mixing_of, op, NULL));
}

int gck_op_mixes(const gck_op_storage *store, const gck_op_rule *rule)
{
    return (store->approximate_inputs && rule->mixing == GCK_OP_SEPARATE)
        || (gck_op_storage_is_approximate(store)
            && (rule->mixing == GCK_OP_JOINT || (rule->mixing == GCK_OP_UNKNOWN && !store->stamped)));
}

int gck_op_runs_again(const gck_py *py, PyObject *op)
{
    return gck_done(PyObject_CallFunctionObjArgs(py->call.warn_mixing, op, NULL));
}

/* Note the memory of a tensor among the outputs.  0 or -1. */
static int note(void *with, PyObject *out)
{
    gck_op_storage *store = with;
    gck_op_watched *watched = &store->watched;
    const int tensor = gck_is_tensor(&store->state->py, out);

    if (tensor <= 0 || watched->n == GCK_WATCHED) {
        return tensor < 0 ? -1 : 0;
    }
    watched->n++;
    return gck_memory_of(&store->state->py, out, &watched->data[watched->n - 1], &watched->nbytes[watched->n - 1]);
}

int gck_op_watch(gck_op_storage *store, const gck_op_rule *rule, PyObject *op, PyObject *out)
{
    if (rule->mixing != GCK_OP_UNKNOWN
        || (!gck_op_storage_is_approximate(store) && !gck_plan_is_lossy(&rule->plan))) {
        return 0;
    }
    GCK_SCOPED PyObject *before = store->watched.op;
    store->watched = (gck_op_watched){.op = Py_NewRef(op), .node = gck_last_node_number(&store->state->py)};
    return store->watched.node == -1 && PyErr_Occurred() ? -1 : gck_each_item(out, note, store);
}

int gck_op_watch_save(gck_op_storage *store, PyObject *x)
{
    gck_op_watched *watched = &store->watched;
    const char *data;
    int64_t nbytes, last;
    int own = 0;

    if (watched->op == NULL) {
        return 0;
    }
    if ((last = gck_last_node_number(&store->state->py)) == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (last != watched->node) {
        Py_CLEAR(watched->op);
        return 0;
    }
    if (gck_memory_of(&store->state->py, x, &data, &nbytes) < 0) {
        return -1;
    }
    for (int i = 0; i < watched->n; i++) {
        own |= nbytes > 0 && data < watched->data[i] + watched->nbytes[i] && watched->data[i] < data + nbytes;
    }
    watched->saves |= own ? GCK_SAVES_RESULT : GCK_SAVES_ARGUMENT;
    return watched->saves != (GCK_SAVES_RESULT | GCK_SAVES_ARGUMENT) || watched->op == NULL
        ? 0 : gck_done(PyObject_CallFunctionObjArgs(store->state->py.call.raise_mixing, watched->op, NULL));
}
