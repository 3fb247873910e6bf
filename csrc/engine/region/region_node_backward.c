/* region_node_backward.c: the backward of a region that is one node. */
#include "engine/region/region_node_backward.h"

#include "torch/abi.h"
#include "torch/calls.h"
#include "torch/tensor.h"
#include "engine/state.h"
#include "engine/payload/packed.h"
#include "engine/region/parameters.h"
#include "engine/region/recompute_env.h"
#include "engine/region/region.h"

PyObject *gck_node_tensors(const gck_py *py, PyObject *out, gck_frame *noted)
{
    const int single = gck_is_tensor(py, out);

    if (single != 0) {
        return single < 0 ? NULL : PyTuple_Pack(1, out);
    }
    GCK_SCOPED PyObject *both = PyObject_CallFunction(py->call.tensors_of, "(O)", out);
    if (both != NULL && noted != NULL) {
        noted->node.outputs = PySequence_GetItem(both, 1);
    }
    return both != NULL ? PySequence_GetItem(both, 0) : NULL;
}

/* Run the region again, with grad.  New reference: the sequence of results to differentiate.
 * Tensors among its arguments are added to `inputs`. */
static PyObject *run_again(gck_frame *frame, PyObject *saved, PyObject *inputs)
{
    gck_state *state = frame->state;
    GCK_SCOPED PyObject *args = NULL, *kwargs = NULL, *out = NULL, *next = PyObject_GetIter(saved);
    gck_recompute_env env;

    if (next != NULL && gck_region_restore(frame, next, inputs, &args, &kwargs) == 0
        && gck_recompute_env_begin(frame, &env) == 0) {
        out = gck_region_call(frame, NULL, NULL, args, kwargs, 1);
        if (gck_recompute_env_end(frame, &env) < 0) {
            Py_CLEAR(out);
        }
    }
    /* torch's form pairs every result by position. */
    return out == NULL || (frame->node.reentrant && gck_is_tensor(&state->py, out) == 0)
         ? gck_give(&out) : gck_node_tensors(&state->py, out, NULL);
}

/* Put outputs that require grad and their incoming gradients into two lists.  0 or -1. */
static int pair_outputs(gck_frame *frame, PyObject *outputs, PyObject *const *grads, Py_ssize_t ngrads, PyObject *roots,
                        PyObject *root_grads)
{
    const gck_py *py = &frame->state->py;
    const Py_ssize_t n = PySequence_Size(outputs);
    int status = n < 0 ? -1 : 0, asked = 0;

    if (n >= 0 && n != ngrads && !frame->node.reentrant) {
        return gck_done(PyErr_Format(PyExc_RuntimeError,
                                     "gradckpt: SelectiveRecompute got %zd tensors from the forward and %zd from the "
                                     "recompute; the region must return as many", ngrads, n));
    }
    for (Py_ssize_t i = 0; i < ngrads; i++) {
        asked |= grads[i] != Py_None;
    }
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        GCK_SCOPED PyObject *x = PySequence_GetItem(outputs, i);
        const int tensor = x == NULL ? -1 : i < ngrads && grads[i] == Py_None ? 0 : gck_is_tensor(py, x);
        const int grad = tensor > 0 ? gck_attr_is_true(x, py->names.requires_grad) : tensor;
        if (grad > 0 && i >= ngrads) {
            PyErr_SetString(PyExc_IndexError, "tuple index out of range");
        }
        if (grad <= 0) {
            status = grad;
        } else if (i >= ngrads || PyList_Append(roots, x) < 0 || PyList_Append(root_grads, grads[i]) < 0) {
            status = -1;
        }
    }
    if (status == 0 && PyList_Size(roots) == 0 && asked) {
        status = gck_raise_torchs(py, "no_grad_output");
    }
    return status;
}

/* New reference: list of the tensors to differentiate by: inputs, then parameters, that require
 * grad now. */
static PyObject *targets_of(const gck_frame *frame, PyObject *inputs)
{
    PyObject *list = PyList_New(0);

    for (Py_ssize_t i = 0; list != NULL && i < PyList_Size(inputs); i++) {
        PyObject *x = PyList_GetItem(inputs, i);
        const int grad = gck_attr_is_true(x, frame->state->py.names.requires_grad);
        if (grad < 0 || (grad && PyList_Append(list, x) < 0)) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Check once for each module that gradients flow to the targets only.  0 or -1. */
static int check_leaves(gck_frame *frame, PyObject *roots, PyObject *targets)
{
    gck_state *state = frame->state;
    const int module = PyObject_IsInstance(frame->function, state->py.Module);

    if (module < 0 || (module && gck_known(state->closed, frame->function))) {
        return module < 0 ? -1 : 0;
    }
    if (gck_done(PyObject_CallFunction(state->py.call.check_leaves, "OOO", frame->function, roots, targets)) < 0) {
        return -1;
    }
    if (module) {
        gck_remember(state->closed, frame->function);
    }
    return 0;
}

/* 1 when one of them has, or had, a hook; 0; -1. */
static int any_hooks(const gck_py *py, PyObject *parameters)
{
    int found = 0;

    for (Py_ssize_t i = 0; found == 0 && i < PyList_Size(parameters); i++) {
        GCK_SCOPED PyObject *hooks = PyObject_GetAttr(PyList_GetItem(parameters, i), py->names._backward_hooks);
        found = hooks == NULL ? -1 : hooks != Py_None;
    }
    return found;
}

/* New reference: gradients of the targets, which are the only leaves that the region uses.  Where
 * the engine captures the gradient of a leaf it calls the leaf's hooks, which are meant for the
 * sum. */
static PyObject *capture(gck_frame *frame, PyObject *roots, PyObject *grads, PyObject *targets)
{
    const gck_py *py = &frame->state->py;
    const int hooks = check_leaves(frame, roots, targets) < 0 ? -1 : any_hooks(py, frame->node.parameters_in);
    GCK_SCOPED PyObject *inputs = hooks < 0 ? NULL : PyList_AsTuple(targets);

    return inputs == NULL ? NULL
         : hooks ? PyObject_CallFunction(py->call.capture, "OOOOO", py->run_backward, roots, grads, inputs,
                                         frame->node.parameters_in)
         : PyObject_CallFunctionObjArgs(py->run_backward, roots, grads, Py_False, Py_False, inputs, Py_True, Py_False,
                                        NULL);
}

/* The same, by a backward that accumulates in every leaf. */
static PyObject *accumulate(gck_frame *frame, PyObject *roots, PyObject *grads, PyObject *targets)
{
    GCK_SCOPED PyObject *none = PyTuple_New(0);
    PyObject *list = NULL;

    if (none != NULL && gck_done(PyObject_CallFunctionObjArgs(frame->state->py.run_backward, roots, grads, Py_False,
                                                              Py_False, none, Py_True, Py_True, NULL)) == 0) {
        list = PyList_New(0);
    }
    for (Py_ssize_t i = 0; list != NULL && i < PyList_Size(targets); i++) {
        gck_add_item(&list, PyObject_GetAttrString(PyList_GetItem(targets, i), "grad"));
    }
    return list;
}

/* New reference: the inputs of torch's form: its arguments, with None in place of what is not a
 * tensor. */
static PyObject *spread(const gck_frame *frame, PyObject *inputs)
{
    PyObject *list = PyList_New(0);
    Py_ssize_t next = 0;

    for (Py_ssize_t i = 0; list != NULL && i < frame->nargs; i++) {
        const int tensor = frame->args[i].kind == GCK_PACKED_BY_NODE && next < PyList_Size(inputs);
        gck_add_item(&list, Py_NewRef(tensor ? PyList_GetItem(inputs, next++) : Py_None));
    }
    return list;
}

/* New reference: (None for frame, args and kwargs, gradients in the order of the node's inputs). */
static PyObject *collect(PyObject *inputs, PyObject *targets, PyObject *grads)
{
    PyObject *list = Py_BuildValue("[OOO]", Py_None, Py_None, Py_None);
    Py_ssize_t next = 0;

    for (Py_ssize_t i = 0; list != NULL && i < PyList_Size(inputs); i++) {
        const int target = grads != NULL && next < PyList_Size(targets)
            && PyList_GetItem(targets, next) == PyList_GetItem(inputs, i);
        gck_add_item(&list, target ? PySequence_GetItem(grads, next++) : Py_NewRef(Py_None));
    }
    return gck_as_tuple(list);
}

static int check_valid(const gck_frame *frame)
{
    const gck_py *py = &frame->state->py;
    const int truth = frame->node.parameters_in != NULL ? 1 : gck_ask(py->is_checkpoint_valid);

    if (truth == 0) {
        if (frame->node.reentrant) {
            return gck_raise_torchs(py, "inputs_given");
        }
        PyErr_SetString(PyExc_RuntimeError, "gradckpt: SelectiveRecompute allows no .grad() or backward(inputs=...) "
                                            "with a callable that is no module; pass the module, its method, or a "
                                            "functools.partial");
    }
    return truth > 0 ? 0 : -1;
}

/* New reference: gradients of the targets, from the outputs that require grad now, which are let go before the
 * backward runs; NULL without an exception: no output requires grad. */
static PyObject *gradients(gck_frame *frame, PyObject **outputs, PyObject *const *grads, Py_ssize_t ngrads,
                           PyObject *targets)
{
    GCK_SCOPED PyObject *roots = PyList_New(0), *root_grads = PyList_New(0);
    int status = roots != NULL && root_grads != NULL
        ? pair_outputs(frame, *outputs, grads, ngrads, roots, root_grads) : -1;

    Py_CLEAR(*outputs);
    roots = gck_as_tuple(roots);
    root_grads = gck_as_tuple(root_grads);
    return status < 0 || roots == NULL || root_grads == NULL || PyTuple_Size(roots) == 0 ? NULL
         : (frame->node.parameters_in != NULL ? capture : accumulate)(frame, roots, root_grads, targets);
}

/* New reference: the result of backward, for a frame that is complete. */
static PyObject *differentiate(gck_frame *frame, PyObject *saved, PyObject *const *grads, Py_ssize_t ngrads)
{
    GCK_SCOPED PyObject *inputs = PyList_New(0), *outputs = inputs != NULL ? run_again(frame, saved, inputs) : NULL;
    GCK_SCOPED PyObject *targets = NULL, *found = NULL, *all = NULL;

    if (outputs == NULL
        || (frame->node.parameters_in != NULL
            && PyList_SetSlice(inputs, PyList_Size(inputs), PyList_Size(inputs), frame->node.parameters_in) < 0)
        || (targets = targets_of(frame, inputs)) == NULL) {
        return NULL;
    }
    /* where all were frozen since the forward: no gradient, and no error */
    if (frame->node.parameters_in == NULL || PyList_Size(targets) > 0) {
        found = gradients(frame, &outputs, grads, ngrads, targets);
    }
    if (found != NULL && !frame->node.reentrant && gck_torch.aoti_torch_grad_mode_is_enabled()) {
        GCK_SCOPED PyObject *exact = found;
        found = PyObject_CallFunction(frame->state->py.call.barred, "(O)", exact);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    all = frame->node.reentrant ? spread(frame, inputs) : Py_NewRef(inputs);
    return all != NULL ? collect(all, targets, found) : NULL;
}

/* The graph is kept, or its saved tensors die now and the frame with them.  0 or -1. */
static int release(const gck_py *py, PyObject *ctx)
{
    const int kept = gck_ask(py->keeps_graph);

    return kept != 0 ? (kept < 0 ? -1 : 0) : PyObject_SetAttr(ctx, py->names.frame, Py_None);
}

PyObject *gck_node_backward(PyObject *module, PyObject *const *all, Py_ssize_t nall)
{
    gck_state *state = gck_state_of(module);
    const gck_py *py = &state->py;
    GCK_SCOPED PyObject *op = nall >= 1 ? PyObject_GetAttr(all[0], py->names.frame) : NULL;
    GCK_SCOPED PyObject *saved = NULL, *result = NULL;
    gck_frame *frame = op != NULL && Py_TYPE(op) == state->Frame ? (gck_frame *)op : NULL;

    /* Where the graph was freed, saved_tensors raises autograd's own error, also when it is
     * empty. */
    if (op != NULL && (frame == NULL || check_valid(frame) == 0)) {
        saved = PyObject_GetAttr(all[0], py->names.saved_tensors);
    }
    if (saved == NULL || frame == NULL || frame->args == NULL) {
        return PyErr_Occurred() ? NULL
             : PyErr_Format(PyExc_RuntimeError, "gradckpt: this checkpointed region was already collected as garbage; "
                                                "keep its output");
    }
    if (gck_region_note_step(state) == 0 && gck_region_note_create_graph(frame) == 0) {
        result = differentiate(frame, saved, all + 1, nall - 1);
    }
    return result == NULL || release(py, all[0]) < 0 ? NULL : gck_give(&result);
}
