/* state.c: what one import of gradckpt._C holds. */
#include "engine/state.h"

#include "torch/ops.h"

gck_state *gck_state_of(PyObject *module) { return PyModule_GetState(module); }

int gck_state_traverse(gck_state *state, visitproc visit, void *arg)
{
    Py_VISIT(state->Payload);
    Py_VISIT(state->CheckpointFunction);
    Py_VISIT(state->SelectiveRecompute);
    Py_VISIT(state->selective_apply);
    Py_VISIT(state->stateless);
    Py_VISIT(state->replay_discrete[0]);
    Py_VISIT(state->replay_discrete[1]);
    Py_VISIT(state->torch_checkpoint);
    Py_VISIT(state->observer);
    Py_VISIT(state->closed);
    Py_VISIT(state->node_kinds);
    Py_VISIT(state->node_names);
    Py_VISIT(state->saved_attributes);
    Py_VISIT(state->unknown_functions);
    Py_VISIT(state->Frame);
    Py_VISIT(state->Holder);
    Py_VISIT(state->Recompute);
    Py_VISIT(state->OpPolicy);
    Py_VISIT(state->OpStorage);
    Py_VISIT(state->Context);
    Py_VISIT(state->OpOutput);
    Py_VISIT(state->Place);
    Py_VISIT(state->latest_place.offload);
    Py_VISIT(state->latest_place.place);
    Py_VISIT(state->SavedHooks);
    Py_VISIT(state->SavedTensor);
    for (int i = 0; i < state->nkinds; i++) {
        Py_VISIT(state->kinds[i].of);
        Py_VISIT(state->kinds[i].method);
    }
    for (int i = 0; i < GCK_NPLANS; i++) {
        Py_VISIT(state->plans[i].key);
    }
    return gck_py_traverse(&state->py, visit, arg);
}

void gck_state_clear(gck_state *state)
{
    Py_CLEAR(state->Payload);
    Py_CLEAR(state->CheckpointFunction);
    Py_CLEAR(state->SelectiveRecompute);
    Py_CLEAR(state->selective_apply);
    Py_CLEAR(state->stateless);
    Py_CLEAR(state->replay_discrete[0]);
    Py_CLEAR(state->replay_discrete[1]);
    Py_CLEAR(state->torch_checkpoint);
    Py_CLEAR(state->observer);
    Py_CLEAR(state->closed);
    Py_CLEAR(state->node_kinds);
    Py_CLEAR(state->node_names);
    Py_CLEAR(state->saved_attributes);
    Py_CLEAR(state->unknown_functions);
#define OPTION(name) Py_CLEAR(state->option_names.name);
    OPTION(function)
    GCK_OPTIONS(OPTION)
#undef OPTION
    Py_CLEAR(state->Frame);
    Py_CLEAR(state->Holder);
    Py_CLEAR(state->Recompute);
    Py_CLEAR(state->OpPolicy);
    Py_CLEAR(state->OpStorage);
    Py_CLEAR(state->Context);
    Py_CLEAR(state->OpOutput);
    Py_CLEAR(state->Place);
    Py_CLEAR(state->latest_place.offload);
    Py_CLEAR(state->latest_place.place);
    Py_CLEAR(state->SavedHooks);
    Py_CLEAR(state->SavedTensor);
    for (int i = 0; i < GCK_NKINDS; i++) {
        Py_CLEAR(state->kinds[i].of);
        Py_CLEAR(state->kinds[i].method);
    }
    for (int i = 0; i < GCK_NPLANS; i++) {
        Py_CLEAR(state->plans[i].key);
    }
    gck_py_clear(&state->py);
}

void gck_count_live(gck_state *state, int64_t nbytes)
{
    gck_stats *s = &state->stats;

    s->live_bytes += nbytes;
    s->peak_live_bytes = s->live_bytes > s->peak_live_bytes ? s->live_bytes : s->peak_live_bytes;
    gck_count_replay(state, 0);
}

void gck_count_replay(gck_state *state, int64_t nbytes)
{
    gck_stats *s = &state->stats;

    s->replay_bytes += nbytes;
    s->peak_bytes = s->live_bytes + s->replay_bytes > s->peak_bytes ? s->live_bytes + s->replay_bytes : s->peak_bytes;
}

PyObject *gck_add_device(PyObject *module, PyObject *capsule)
{
    gck_py *py = &gck_state_of(module)->py;
    const gck_device_kind *kind = PyCapsule_GetPointer(capsule, "gck_device_kind");
    PyObject *type = kind != NULL ? PyUnicode_FromString(kind->name) : NULL, *before = py->accelerator;

    if (type == NULL) {
        return NULL;
    }
    if (gck_ops_add(kind) != 0) {
        Py_DECREF(type);
        return PyErr_Format(PyExc_RuntimeError, "gradckpt: torch rejected the operators for %s; add one kind of device "
                            "only", kind->name);
    }
    py->accelerator = type;
    Py_DECREF(before);
    Py_RETURN_NONE;
}
