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
    PyObject *both, *tensors;

    if (single != 0) {
        return single < 0 ? NULL : PyTuple_Pack(1, out);
    }
    both = PyObject_CallFunction(py->call.tensors_of, "(O)", out);
    tensors = both != NULL ? PySequence_GetItem(both, 0) : NULL;
    if (both != NULL && noted != NULL) {
        noted->node.outputs = PySequence_GetItem(both, 1);
    }
    Py_XDECREF(both);
    return tensors;
}

/* Run the region again, with grad.  New reference: the sequence of results to differentiate.
 * Tensors among its arguments are added to `inputs`. */
static PyObject *run_again(gck_frame *frame, PyObject *saved, PyObject *inputs)
{
    gck_state *state = frame->state;
    PyObject *args = NULL, *kwargs = NULL, *out = NULL, *tensors, *next = PyObject_GetIter(saved);
    gck_recompute_env env;

    if (next != NULL && gck_region_restore(frame, next, inputs, &args, &kwargs) == 0
        && gck_recompute_env_begin(frame, &env) == 0) {
        out = gck_region_call(frame, NULL, NULL, args, kwargs, 1);
        if (gck_recompute_env_end(frame, &env) < 0) {
            Py_CLEAR(out);
        }
    }
    Py_XDECREF(next);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    /* torch's form pairs every result by position. */
    if (out == NULL || (frame->node.reentrant && gck_is_tensor(&state->py, out) == 0)) {
        return out;
    }
    tensors = gck_node_tensors(&state->py, out, NULL);
    Py_DECREF(out);
    return tensors;
}

/* Put outputs that require grad and their incoming gradients into two lists.  0 or -1. */
static int pair_outputs(gck_frame *frame, PyObject *outputs, PyObject *const *grads, Py_ssize_t ngrads, PyObject *roots,
                        PyObject *root_grads)
{
    const gck_py *py = &frame->state->py;
    const Py_ssize_t n = PySequence_Size(outputs);
    int status = n < 0 ? -1 : 0, asked = 0;

    if (n >= 0 && n != ngrads && !frame->node.reentrant) {
        PyErr_Format(PyExc_RuntimeError,
                     "gradckpt: SelectiveRecompute got %zd tensors from the forward and %zd from the "
                     "recompute; the region must return as many", ngrads, n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < ngrads; i++) {
        asked |= grads[i] != Py_None;
    }
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        PyObject *x = PySequence_GetItem(outputs, i);
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
        Py_XDECREF(x);
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
        PyObject *hooks = PyObject_GetAttr(PyList_GetItem(parameters, i), py->names._backward_hooks);
        found = hooks == NULL ? -1 : hooks != Py_None;
        Py_XDECREF(hooks);
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
    PyObject *inputs = hooks < 0 ? NULL : PyList_AsTuple(targets), *result = NULL;

    if (inputs != NULL && hooks) {
        result = PyObject_CallFunction(py->call.capture, "OOOOO", py->run_backward, roots, grads, inputs,
                                       frame->node.parameters_in);
    } else if (inputs != NULL) {
        result = PyObject_CallFunctionObjArgs(py->run_backward, roots, grads, Py_False, Py_False, inputs, Py_True,
                                              Py_False, NULL);
    }
    Py_XDECREF(inputs);
    return result;
}

/* The same, by a backward that accumulates in every leaf. */
static PyObject *accumulate(gck_frame *frame, PyObject *roots, PyObject *grads, PyObject *targets)
{
    PyObject *none = PyTuple_New(0), *list = NULL;

    if (none != NULL && gck_done(PyObject_CallFunctionObjArgs(frame->state->py.run_backward, roots, grads, Py_False,
                                                              Py_False, none, Py_True, Py_True, NULL)) == 0) {
        list = PyList_New(0);
    }
    for (Py_ssize_t i = 0; list != NULL && i < PyList_Size(targets); i++) {
        gck_add_item(&list, PyObject_GetAttrString(PyList_GetItem(targets, i), "grad"));
    }
    Py_XDECREF(none);
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

/* New reference: gradients of the targets, from the outputs that require grad now; NULL without an
 * exception: no output requires grad. */
static PyObject *gradients(gck_frame *frame, PyObject *outputs, PyObject *const *grads, Py_ssize_t ngrads,
                           PyObject *targets)
{
    PyObject *roots = PyList_New(0), *root_grads = PyList_New(0), *found = NULL;
    int status = roots != NULL && root_grads != NULL
        ? pair_outputs(frame, outputs, grads, ngrads, roots, root_grads) : -1;

    Py_DECREF(outputs);
    roots = gck_as_tuple(roots);
    root_grads = gck_as_tuple(root_grads);
    if (status == 0 && roots != NULL && root_grads != NULL && PyTuple_Size(roots) > 0) {
        found = (frame->node.parameters_in != NULL ? capture : accumulate)(frame, roots, root_grads, targets);
    }
    Py_XDECREF(roots);
    Py_XDECREF(root_grads);
    return found;
}

/* New reference: the result of backward, for a frame that is complete. */
static PyObject *differentiate(gck_frame *frame, PyObject *saved, PyObject *const *grads, Py_ssize_t ngrads)
{
    PyObject *inputs = PyList_New(0), *outputs = inputs != NULL ? run_again(frame, saved, inputs) : NULL;
    PyObject *targets = NULL, *found = NULL, *all = NULL, *result = NULL;

    if (outputs == NULL
        || (frame->node.parameters_in != NULL
            && PyList_SetSlice(inputs, PyList_Size(inputs), PyList_Size(inputs), frame->node.parameters_in) < 0)
        || (targets = targets_of(frame, inputs)) == NULL) {
        Py_XDECREF(outputs);
    } else if (frame->node.parameters_in != NULL && PyList_Size(targets) == 0) {
        Py_DECREF(outputs);                      /* all were frozen since the forward: no gradient, and no error */
    } else {
        found = gradients(frame, outputs, grads, ngrads, targets);
    }
    if (found != NULL && !frame->node.reentrant && gck_torch.aoti_torch_grad_mode_is_enabled()) {
        PyObject *exact = found;
        found = PyObject_CallFunction(frame->state->py.call.barred, "(O)", exact);
        Py_DECREF(exact);
    }
    if (!PyErr_Occurred()) {
        all = frame->node.reentrant ? spread(frame, inputs) : Py_NewRef(inputs);
        result = all != NULL ? collect(all, targets, found) : NULL;
    }
    Py_XDECREF(all);
    Py_XDECREF(inputs);
    Py_XDECREF(targets);
    Py_XDECREF(found);
    return result;
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
    PyObject *op = nall >= 1 ? PyObject_GetAttr(all[0], py->names.frame) : NULL, *saved = NULL, *result = NULL;
    gck_frame *frame = op != NULL && Py_TYPE(op) == state->Frame ? (gck_frame *)op : NULL;

    /* Where the graph was freed, saved_tensors raises autograd's own error, also when it is
     * empty. */
    if (op != NULL && (frame == NULL || check_valid(frame) == 0)) {
        saved = PyObject_GetAttr(all[0], py->names.saved_tensors);
    }
    if (saved == NULL || frame == NULL || frame->args == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError, "gradckpt: this checkpointed region was already collected as garbage; "
                                                "keep its output");
        }
    } else if (gck_region_note_step(state) == 0 && gck_region_note_create_graph(frame) == 0) {
        result = differentiate(frame, saved, all + 1, nall - 1);
        if (result != NULL && release(py, all[0]) < 0) {
            Py_CLEAR(result);
        }
    }
    Py_XDECREF(saved);
    Py_XDECREF(op);
    return result;
}
