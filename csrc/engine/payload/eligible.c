/* eligible.c: the one rule for which tensors compress= compresses; Python asks it too. */
#include "engine/payload/eligible.h"

gck_skip_reason gck_eligible(const gck_plan *plan, int requires_grad, int leaf, int parameter)
{
    /* include="floating" takes all floating tensors.  A parameter stays alive anyway, and so does
     * every leaf that requires grad: autograd's AccumulateGrad holds it.  A fake-quantized forward
     * replaces x by a result of x, which is not a leaf, so there include="floating" skips leaves
     * too. */
    const int leaves = plan->floating && !plan->fake_quantize;

    if (!requires_grad && !plan->floating) {
        return GCK_SKIP_NO_GRAD;
    }
    return parameter || (requires_grad && leaf && !leaves) ? GCK_SKIP_LEAF : GCK_COMPRESS;
}

PyObject *gck_eligible_py(PyObject *module, PyObject *args)
{
    gck_plan plan = {.codec = NULL};
    int requires_grad, leaf;

    (void)module;
    if (!PyArg_ParseTuple(args, "pppp", &requires_grad, &leaf, &plan.floating, &plan.fake_quantize)) {
        return NULL;
    }
    return PyBool_FromLong(gck_eligible(&plan, requires_grad, leaf, 0) == GCK_COMPRESS);
}
