/* region_node.c: the two autograd Functions whose forward and backward are C: how they are called,
 * and their forward.
 *
 * CheckpointFunction is torch's, down to its texts and its names in profiles.  In
 * SelectiveRecompute the parameters of a module are inputs of the node, so it returns their
 * gradients. */
#include "engine/region/region_node.h"

#include "torch/abi.h"
#include "torch/calls.h"
#include "torch/ambient.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/payload/input_aliasing.h"
#include "engine/payload/packed.h"
#include "engine/selective/op_policy.h"
#include "engine/selective/op_storage.h"
#include "engine/region/frame.h"
#include "engine/region/parameters.h"
#include "engine/region/region.h"
#include "engine/region/region_node_backward.h"

static const char selective_doc[] =
    "One graph node for a region that keeps what a policy names and recomputes the rest.\n\n"
    "``SelectiveRecompute.apply(function, policy, *args, compress=None, offload=None, **kwargs)`` returns the result\n"
    "of ``function(*args, **kwargs)``.\n\n"
    "Args:\n"
    "    function: A Module, a bound method of one, or a ``functools.partial`` of these, whose parameters are\n"
    "        also inputs of the node. For any other callable, gradients of tensors that are not arguments are\n"
    "        accumulated by a backward inside the backward, as in torch's reentrant checkpoint, with its\n"
    "        restrictions.\n"
    "    policy: As in gradckpt.compat.create_selective_checkpoint_contexts; None keeps nothing.\n"
    "    *args, **kwargs: Passed to ``function``. Tensors may be nested in containers.\n"
    "    compress, offload: How and where the tensors among them are kept, as in gradckpt.checkpoint.\n\n"
    "Raises:\n"
    "    RuntimeError: in backward: a second one, when anything was kept; a gradient of the gradient; for callables\n"
    "        that are not modules, ``autograd.grad`` or ``backward(inputs=...)``; a module that uses a tensor which\n"
    "        requires grad and is neither one of its parameters nor an argument.\n\n"
    "Random state, autocast and running statistics behave as in gradckpt.checkpoint. It needs no saved-tensor hooks.";

/* ---- outputs ---- */

/* New reference: the output, from tensors that autograd has made its own. */
static PyObject *assemble(gck_frame *frame, PyObject *tensors)
{
    PyObject *rest = frame->node.outputs;

    frame->node.outputs = NULL;
    return rest == NULL ? PySequence_GetItem(tensors, 0)
                        : PyObject_CallFunction(frame->state->py.call.together, "NO", rest, tensors);
}

/* ---- forward ---- */

static int touch(gck_frame *frame)
{
    int status = 0;

    for (Py_ssize_t i = 0; status == 0 && i < frame->nargs + frame->nkwargs; i++) {
        status = gck_packed_touch(frame->state, &frame->args[i]);
    }
    return status;
}

static int warn_without_grad(const gck_py *py, PyObject *inputs)
{
    int grad = 0;

    for (Py_ssize_t i = 0; grad == 0 && i < PyList_Size(inputs); i++) {
        grad = gck_attr_is_true(PyList_GetItem(inputs, i), py->names.requires_grad);
    }
    return grad != 0 ? grad
         : gck_done(PyObject_CallFunction(py->call.warn_torchs, "s", "no_grad_inputs"));
}

/* Keep the arguments of torch's form: its tensors become the node's saved tensors, and the rest of
 * the frame is read here, within the node.  *args: what the function gets, owned by the caller.  0
 * or -1. */
static int keep_arguments(gck_frame *frame, PyObject *ctx, PyObject *flags, PyObject *const *all, Py_ssize_t n,
                          PyObject **args)
{
    const gck_py *py = &frame->state->py;
    GCK_CLEARED_BY(gck_packing_end) gck_packing packing = {.state = frame->state, .of_node = 1};
    GCK_SCOPED PyObject *inputs = PyList_New(0), *tuple = NULL, *save = NULL, *none = NULL;
    int preserve, exact, status = inputs != NULL && PyArg_ParseTuple(flags, "pp", &preserve, &exact) ? 0 : -1;

    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        const int tensor = gck_is_tensor(py, all[i]);
        status = tensor > 0 ? PyList_Append(inputs, all[i]) : tensor;
    }
    if (status == 0 && (status = warn_without_grad(py, inputs)) >= 0
        && (status = gck_region_keep(frame, &packing, all, n, NULL, preserve, exact, args, &none)) == 0) {
        tuple = PyList_AsTuple(inputs);
        save = tuple != NULL ? PyObject_GetAttr(ctx, py->names.save_for_backward) : NULL;
        status = tuple != NULL && save != NULL ? gck_done(PyObject_Call(save, tuple, NULL)) : -1;
    }
    Py_CLEAR(frame->ambient.device);             /* torch's reentrant form does not enter it again */
    return status;
}

/* Autograd has switched grad mode off.  The call is forward(ctx, frame, args, kwargs or None,
 * *inputs), and for torch's form forward(ctx, frame, (preserve_rng_state, exact), None, *args). */
static PyObject *forward(PyObject *module, PyObject *const *all, Py_ssize_t nall)
{
    gck_state *state = gck_state_of(module);
    gck_frame *frame = nall < 4 ? NULL : (gck_frame *)all[1];
    GCK_SCOPED PyObject *args = NULL, *out = NULL;

    if (frame == NULL || Py_TYPE(all[1]) != state->Frame) {
        return PyErr_Format(PyExc_TypeError, "gradckpt: SelectiveRecompute.forward needs a frame; "
                                             "call SelectiveRecompute.apply");
    }
    if (PyObject_SetAttr(all[0], state->py.names.frame, (PyObject *)frame) < 0) {
        return NULL;
    }
    if (frame->node.reentrant) {
        return keep_arguments(frame, all[0], all[2], all + 4, nall - 4, &args) < 0
             ? NULL : gck_region_call(frame, NULL, NULL, args, NULL, 0);
    }
    if (gck_done(PyObject_CallMethodObjArgs(all[0], state->py.names.set_materialize_grads, Py_False, NULL)) == 0) {
        out = gck_region_call(frame, NULL, NULL, all[2], all[3] != Py_None ? all[3] : NULL, 0);
    }
    return out != NULL && touch(frame) == 0 ? gck_node_tensors(&state->py, out, frame) : NULL;
}

/* Add the parameters of the module behind the function to the inputs.  0 or -1. */
static int add_parameters(gck_frame *frame, PyObject *inputs)
{
    const gck_py *py = &frame->state->py;
    const Py_ssize_t n = PyList_Size(inputs);
    GCK_SCOPED PyObject *module = NULL;

    if (gck_module_behind(py, frame->function, &module) < 0 || module == NULL) {
        return module == NULL && !PyErr_Occurred() ? 0 : -1;
    }
    frame->node.parameters_in = gck_parameters_of(py, module);
    return frame->node.parameters_in == NULL ? -1 : PyList_SetSlice(inputs, n, n, frame->node.parameters_in);
}

/* New reference: the tensors in the region's result, as a tuple. */
static PyObject *call(gck_frame *frame, gck_packing *packing, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs)
{
    const gck_py *py = &frame->state->py;
    GCK_SCOPED PyObject *inputs = PyList_New(0), *fed_args = NULL, *fed_kwargs = NULL, *head = NULL, *all = NULL;
    GCK_SCOPED PyObject *result = NULL;

    packing->inputs = inputs;
    if (inputs != NULL && gck_region_keep(frame, packing, args, nargs, kwargs, 1, 0, &fed_args, &fed_kwargs) == 0
        && add_parameters(frame, inputs) == 0 && warn_without_grad(py, inputs) >= 0) {
        head = Py_BuildValue("[OOO]", (PyObject *)frame, fed_args, fed_kwargs ? fed_kwargs : Py_None);
    }
    if (head != NULL && PyList_SetSlice(inputs, 0, 0, head) == 0 && (all = PyList_AsTuple(inputs)) != NULL) {
        result = PyObject_Call(frame->state->selective_apply, all, NULL);
    }
    return result == NULL || gck_input_aliasing_check(packing->aliases, py) < 0 ? NULL : gck_give(&result);
}

/* ---- checkpoint(use_reentrant=True) ---- */

/* 0, or -1 with torch's ValueError. */
static int check_options(const gck_state *state, const gck_options *o, PyObject *kwargs)
{
    const int compress = o->compress != NULL && o->compress != Py_None && o->compress != Py_False;
    const int offload = o->offload != NULL && o->offload != Py_None && o->offload != Py_False;
    const char *ours = compress ? "compress" : gck_options_policy(o) ? "policy" : offload ? "offload" : NULL;
    const struct { PyObject *value; const char *name; } only_otherwise[] = {
        {gck_options_custom_context(state, o) ? o->context_fn : NULL, "context_fn"},
        {o->debug != Py_False ? o->debug : NULL, "debug"},
        {o->respect_saved_tensors_hooks != Py_None ? o->respect_saved_tensors_hooks : NULL,
         "respect_saved_tensors_hooks"},
    };
    GCK_SCOPED PyObject *given = kwargs != NULL ? PyDict_Copy(kwargs) : PyDict_New();
    int status = given == NULL ? -1 : 0;

    for (size_t i = 0; status == 0 && i < sizeof only_otherwise / sizeof *only_otherwise; i++) {
        if (only_otherwise[i].value != NULL) {
            status = PyDict_SetItemString(given, only_otherwise[i].name, only_otherwise[i].value);
        }
    }
    if (status == 0 && (PyDict_Size(given) > 0 || ours != NULL)) {
        status = gck_done(PyObject_CallFunction(state->py.call.check_reentrant, "Oz", given, ours));
    }
    return status;
}

PyObject *gck_reentrant_call(gck_state *state, const gck_options *o, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwargs)
{
    const int preserve = gck_truth(o->preserve_rng_state, 1);
    GCK_SCOPED gck_frame *frame = preserve < 0 || check_options(state, o, kwargs) < 0 ? NULL : gck_frame_new(state);
    GCK_SCOPED PyObject *apply = frame != NULL ? PyObject_GetAttrString(state->CheckpointFunction, "apply") : NULL;
    GCK_SCOPED PyObject *rest = apply != NULL ? gck_tuple(args, nargs) : NULL;
    GCK_SCOPED PyObject *head = rest == NULL ? NULL
                              : Py_BuildValue("(O(ii)O)", (PyObject *)frame, preserve, o->exact, Py_None);
    GCK_SCOPED PyObject *all = head != NULL ? PySequence_Concat(head, rest) : NULL;

    if (all == NULL) {
        return NULL;
    }
    frame->function = Py_NewRef(o->function);
    frame->once = Py_XNewRef(o->once);
    frame->node.reentrant = 1;
    return PyObject_Call(apply, all, NULL);
}

/* ---- SelectiveRecompute.apply ---- */

/* Take our keywords, compress and offload, out of kwargs (a dict, or NULL).  *place: as gck_options_place(). */
static int take_options(gck_state *state, PyObject *kwargs, gck_plan *plan, PyObject **place)
{
    PyObject *compress = kwargs != NULL ? PyDict_GetItemString(kwargs, "compress") : NULL;
    PyObject *offload = kwargs != NULL ? PyDict_GetItemString(kwargs, "offload") : NULL;

    if (gck_options_plan(state, compress, plan) < 0 || gck_options_place(state, offload, plan, place) < 0
        || (compress != NULL && PyDict_DelItemString(kwargs, "compress") < 0)
        || (offload != NULL && PyDict_DelItemString(kwargs, "offload") < 0)) {
        return -1;
    }
    if (plan->fake_quantize) {
        return gck_done(PyErr_Format(PyExc_ValueError, "gradckpt: SelectiveRecompute takes no fake_quantize=; "
                                                       "use gradckpt.checkpoint"));
    }
    return 0;
}

/* Put the store and the policy of the region into the frame.  0 or -1. */
static int take_policy(gck_frame *frame, PyObject *policy)
{
    gck_state *state = frame->state;
    PyObject *names, *function;

    if (policy == Py_None) {
        return 0;
    }
    GCK_SCOPED PyObject *read = PyObject_CallFunction(state->py.call.selective_policy, "(O)", policy);
    if (read == NULL || !PyArg_ParseTuple(read, "O!O", state->OpPolicy, &names, &function)) {
        return -1;
    }
    if (((gck_op_policy *)names)->n == 0 && function == Py_None) {
        return 0;
    }
    frame->store = gck_op_storage_new(state, (gck_op_policy *)names, 0, 0);
    frame->node.policy_fn = function != Py_None ? Py_NewRef(function) : NULL;
    return frame->store != NULL ? 0 : -1;
}

static int refuse_functorch(const gck_py *py)
{
    const int active = gck_functorch_active(py);

    if (active > 0) {
        PyErr_SetString(PyExc_RuntimeError, "gradckpt: SelectiveRecompute does not work under torch.func transforms; "
                                            "call them inside the region, or use gradckpt.checkpoint");
    }
    return active == 0 ? 0 : -1;
}

/* apply(function, policy, *args, **kwargs); kwargs is owned by this call, or NULL. */
static PyObject *apply_selective(gck_state *state, PyObject *const *all, Py_ssize_t nall, PyObject *kwargs)
{
    GCK_CLEARED_BY(gck_packing_end) gck_packing packing = {.state = state, .nested = 1};
    GCK_SCOPED gck_frame *frame = gck_frame_new(state);
    GCK_SCOPED PyObject *tensors = NULL, *place = NULL;

    if (frame == NULL || take_options(state, kwargs, &packing.plan, &place) < 0 || refuse_functorch(&state->py) < 0) {
        return NULL;
    }
    kwargs = kwargs != NULL && PyDict_Size(kwargs) > 0 ? kwargs : NULL;
    frame->function = Py_NewRef(all[0]);
    frame->once = Py_NewRef(Py_None);
    if (!gck_torch.aoti_torch_grad_mode_is_enabled()) {
        GCK_SCOPED PyObject *tuple = gck_tuple(all + 2, nall - 2);
        return tuple != NULL ? PyObject_Call(frame->function, tuple, kwargs) : NULL;
    }
    tensors = take_policy(frame, all[1]) == 0 ? call(frame, &packing, all + 2, nall - 2, kwargs) : NULL;
    return tensors != NULL ? assemble(frame, tensors) : NULL;
}

/* Run the forward uncompiled. */
static PyObject *apply(PyObject *module, PyObject *const *all, Py_ssize_t nall, PyObject *kwnames)
{
    gck_state *state = gck_state_of(module);
    const Py_ssize_t nkw = kwnames != NULL ? PyTuple_Size(kwnames) : 0;
    GCK_SCOPED PyObject *kwargs = nkw > 0 ? PyDict_New() : NULL;
    PyObject *dynamo, *result;

    if (nall < 2) {
        return PyErr_Format(PyExc_TypeError, "gradckpt: SelectiveRecompute.apply(function, policy, *args) "
                                             "takes a function and a policy");
    }
    for (Py_ssize_t i = 0; kwargs != NULL && i < nkw; i++) {
        if (PyDict_SetItem(kwargs, PyTuple_GetItem(kwnames, i), all[nall + i]) < 0) {
            Py_CLEAR(kwargs);
        }
    }
    if ((kwargs == NULL && nkw > 0) || gck_dynamo_off(&state->py, &dynamo) < 0) {
        return NULL;
    }
    result = apply_selective(state, all, nall, kwargs);
    gck_dynamo_restore(&state->py, dynamo);
    return result;
}

/* ---- the classes ---- */

static PyMethodDef apply_def = {"apply", (PyCFunction)(void (*)(void))apply, METH_FASTCALL | METH_KEYWORDS,
                                selective_doc};
static PyMethodDef forward_def = {"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL, NULL};
static PyMethodDef backward_def = {"backward", (PyCFunction)(void (*)(void))gck_node_backward, METH_FASTCALL, NULL};

int gck_node_classes(PyObject *module, gck_state *state)
{
    GCK_SCOPED PyObject *made = gck_invoke(state->py.node_classes,
                                         Py_BuildValue("(NNNs)", PyCFunction_NewEx(&forward_def, module, NULL),
                                                       PyCFunction_NewEx(&backward_def, module, NULL),
                                                       PyCFunction_NewEx(&apply_def, module, NULL), selective_doc));
    PyObject *reentrant, *selective, *autograds;

    if (made == NULL || !PyArg_ParseTuple(made, "OOO", &reentrant, &selective, &autograds)) {
        return -1;
    }
    state->CheckpointFunction = Py_NewRef(reentrant);
    state->SelectiveRecompute = Py_NewRef(selective);
    state->selective_apply = Py_NewRef(autograds);
    return 0;
}
