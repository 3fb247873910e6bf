/* state.c: what one import of gradckpt._C holds. */
#include "engine/state.h"

#include "torch/calls.h"
#include "torch/ops.h"

gck_state *gck_state_of(PyObject *module) { return PyModule_GetState(module); }

#define OF(field) offsetof(gck_state, field)
static const gck_owned owned[] = {
    OF(Payload), OF(CheckpointFunction), OF(SelectiveRecompute), OF(selective_apply), OF(stateless),
    OF(replay_discrete[0]), OF(replay_discrete[1]), OF(torch_checkpoint), OF(observer), OF(closed), OF(node_kinds),
    OF(node_names), OF(saved_attributes), OF(unknown_functions), OF(Frame), OF(Holder), OF(Recompute), OF(OpPolicy),
    OF(OpStorage), OF(Context), OF(OpOutput), OF(Place), OF(latest_place.offload), OF(latest_place.place),
    OF(SavedHooks), OF(SavedTensor), 0,
};
#undef OF

int gck_state_traverse(gck_state *state, visitproc visit, void *arg)
{
    for (int i = 0; i < state->nkinds; i++) {
        Py_VISIT(state->kinds[i].of);
        Py_VISIT(state->kinds[i].method);
    }
    for (int i = 0; i < GCK_NPLANS; i++) {
        Py_VISIT(state->plans[i].key);
    }
    const int visited = gck_owned_visit(state, owned, visit, arg);
    return visited != 0 ? visited : gck_py_traverse(&state->py, visit, arg);
}

void gck_state_clear(gck_state *state)
{
    gck_owned_clear(state, owned);
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
    GCK_SCOPED PyObject *type = kind != NULL ? PyUnicode_FromString(kind->name) : NULL;

    if (type == NULL) {
        return NULL;
    }
    if (gck_ops_add(kind) != 0) {
        return PyErr_Format(PyExc_RuntimeError, "gradckpt: torch rejected the operators for %s; add one kind of device "
                            "only", kind->name);
    }
    GCK_SCOPED PyObject *before = py->accelerator;
    py->accelerator = gck_give(&type);
    Py_RETURN_NONE;
}
