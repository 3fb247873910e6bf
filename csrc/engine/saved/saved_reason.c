/* saved_reason.c: why a saved tensor stays uncompressed, as far as that is known when it is packed. */
#include "engine/saved/saved_reason.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/checkpoint_options.h"
#include "engine/payload/packed.h"
#include "engine/saved/saved_functions.h"
#include "engine/saved/saved_leaf.h"
#include "engine/saved/saved_role.h"

/* 1 when a view with this base is one of a weight, 0 when of something else, which the node with the number *made has
 * made; -1. */
static int is_of_weight(const gck_saved_hooks *self, PyObject *base, int64_t *made)
{
    gck_state *state = self->packing.state;
    GCK_CLEARED_BY(gck_input_clear) gck_input of = gck_input_of(base);
    GCK_SCOPED PyObject *node = gck_node_of(state, &of);
    int weight = node == NULL || gck_input_read(&state->py, &of, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0 ? -1
               : (PyObject *)Py_TYPE(base) == state->py.Parameter || (of.requires_grad && of.leaf);

    *made = -1;
    if (weight == 0 && node != Py_None) {
        weight = gck_lies_in_leaf(state, base, node);
        *made = gck_node_number(&state->py, node);
        weight = *made < 0 ? -1 : weight;
    }
    return weight;
}

/* 1 when a Function in Python may have made this tensor for its backward: a view that its forward has made of an
 * activation requires grad and looks like a leaf, a new tensor does not even require grad; 0; -1.  *made: the node that
 * has made what it is a view of.  *in: its grad flags are known. */
static int may_be_of_function(const gck_saved_hooks *self, gck_input *in, int64_t *made)
{
    gck_py *py = &self->packing.state->py;
    const gck_plan *plan = &self->packing.plan;
    GCK_SCOPED PyObject *base = NULL;
    int weight, reason;

    *made = -1;
    if (self->waiting == NULL || self->packing.outer || gck_packing_for_region || (in->requires_grad && !in->leaf)) {
        return 0;
    }
    reason = gck_input_skip_reason_of_shape(py, in, plan->codec, plan->min_numel);
    if (reason != GCK_COMPRESS) {
        return reason < 0 ? -1 : 0;
    }
    base = PyObject_GetAttr(in->x, py->names._base);
    weight = base == NULL ? -1 : base == Py_None ? in->requires_grad : is_of_weight(self, base, made);
    return weight < 0 ? -1 : !weight;
}

/* The form of a tensor that requires grad and was made by the node with the number `made`, as far as it is
 * known while the node `number` is being made.  A reason as below. */
static int form_when_packed(const gck_saved_hooks *self, gck_input *in, PyObject *node, int64_t made, int64_t number,
                            gck_saved_as *as, gck_saved_when *when)
{
    gck_state *state = self->packing.state;
    const int in_leaf = node == Py_None ? 0 : gck_lies_in_leaf(state, in->x, node);
    int64_t which;

    if (in_leaf != 0) {
        return in_leaf < 0 ? -1 : GCK_SKIP_LEAF;
    }
    if (self->waiting == NULL || gck_packing_for_region) {
        as->codec = self->packing.plan.codec;
        return GCK_SKIP_EXACT;
    }
    if (made == number && gck_is_function(node)) {       /* it does not tell all yet */
        *when = self->packing.outer ? GCK_DECIDED : GCK_IF_FUNCTION_OF_RESULT;
        return GCK_SKIP_EXACT;
    }
    *when = made < number || made == INT64_MAX ? GCK_WAITS : GCK_DECIDED;
    if (*when == GCK_WAITS || made != number) {
        return GCK_SKIP_EXACT;
    }
    which = gck_as_int64(PyObject_GetAttr(in->x, state->py.names.output_nr));
    if (which == -1 && PyErr_Occurred()) {
        return -1;
    }
    return which == 0 && gck_saved_as_result(state, &self->formats, node, in, as) < 0 ? -1 : GCK_SKIP_EXACT;
}

int gck_saved_reason(const gck_saved_hooks *self, gck_input *in, PyObject *node, int64_t made, int64_t number,
                     int tracing, gck_saved_as *as, gck_saved_when *when)
{
    gck_py *py = &self->packing.state->py;
    const gck_plan *plan = &self->packing.plan;
    const gck_codec *codec;
    int64_t made_base;
    int reason, form, of_function;

    if (gck_input_read(py, in, GCK_FACT_GRAD | GCK_FACT_LEAF) < 0) {
        return -1;
    }
    if ((PyObject *)Py_TYPE(in->x) == py->Parameter) {
        return GCK_SKIP_LEAF;
    }
    if ((of_function = may_be_of_function(self, in, &made_base)) < 0) {
        return -1;
    }
    *when = !of_function ? GCK_DECIDED : made_base == number ? GCK_IF_FUNCTION_OF_RESULT : GCK_IF_FUNCTION;
    if (gck_eligible(plan, in->requires_grad, in->leaf, 0) == GCK_SKIP_LEAF) {
        return GCK_SKIP_LEAF;
    }
    codec = in->requires_grad ? plan->codec : gck_codec_find("mask");
    reason = gck_input_skip_reason_of_shape(py, in, codec, plan->min_numel);
    if (reason == GCK_COMPRESS && (tracing = tracing >= 0 ? tracing : gck_tracing(py)) != 0) {
        return tracing < 0 ? -1 : GCK_SKIP_TRACING;
    }
    if (!in->requires_grad) {
        as->codec = reason == GCK_COMPRESS ? codec : NULL;
        return reason == GCK_SKIP_DTYPE || reason == GCK_SKIP_FLOAT64 ? GCK_SKIP_NO_GRAD : reason;
    }
    if (reason != GCK_COMPRESS && reason != GCK_SKIP_SMALL) {
        return reason;
    }
    form = form_when_packed(self, in, node, made, number, as, when);
    if (form == GCK_SKIP_EXACT && reason == GCK_SKIP_SMALL) {
        *when = GCK_DECIDED;
        gck_saved_as_clear(as);
        return reason;
    }
    return form;
}
