/* selective_function.c: SelectiveRecompute, an autograd Function whose apply, forward and
 * backward are C.
 *
 * Forward runs the region without a graph and keeps its inputs and what the policy names;
 * backward runs it again on detached inputs, gets the kept outputs back instead of running
 * their operators, and differentiates that.  The parameters of a module are inputs of the
 * node, so it returns their gradients and needs no hook of anybody's. */
#include "selective_function.h"

#include "../torch/dynamo.h"
#include "leaves.h"
#include "options.h"
#include "parameters.h"

#include <stdlib.h>

const char gck_selective_doc[] =
    "One graph node for a region that keeps what a policy names and recomputes the rest.\n\n"
    "``SelectiveRecompute.apply(function, policy, *args, compress=None, **kwargs)`` returns what\n"
    "``function(*args, **kwargs)`` returns.\n\n"
    "Args:\n"
    "    function: A Module, a bound method of one, or a ``functools.partial`` of these: their parameters are inputs\n"
    "        of the node, too. Any other callable: gradients of tensors that it gets from elsewhere are accumulated\n"
    "        by a backward inside the backward, as torch's reentrant checkpoint does, with its restrictions.\n"
    "    policy: What gradckpt.create_selective_checkpoint_contexts takes; None keeps nothing.\n"
    "    *args, **kwargs: For ``function``; tensors may be nested in containers.\n"
    "    compress: How the tensors among them are kept, as in gradckpt.checkpoint.\n\n"
    "Raises:\n"
    "    RuntimeError: in backward: a second one, when anything was kept; a gradient of the gradient; for callables\n"
    "        that are no modules, ``autograd.grad`` or ``backward(inputs=...)``; a module that uses a tensor which\n"
    "        requires grad and is neither a parameter of it nor an argument.\n\n"
    "Random state, autocast and running statistics as in gradckpt.checkpoint. It needs no saved-tensor hooks.";

/* ---- apply ---- */

/* Our keywords out of kwargs (a dict of the caller's, or NULL): compress. */
static int take_options(gck_state *state, PyObject **kwargs, gck_plan *plan)
{
    PyObject *compress = *kwargs != NULL ? PyDict_GetItemString(*kwargs, "compress") : NULL;

    if (gck_options_plan(state, compress, plan) < 0) {
        return -1;
    }
    if (compress != NULL && PyDict_DelItemString(*kwargs, "compress") < 0) {
        return -1;
    }
    if (plan->replay) {
        PyErr_SetString(PyExc_ValueError, "gradckpt.SelectiveRecompute: replay= needs gradckpt.checkpoint");
        return -1;
    }
    if (*kwargs != NULL && PyDict_Size(*kwargs) == 0) {
        *kwargs = NULL;
    }
    return 0;
}

/* Store and policy of the region in the frame.  0 or -1. */
static int take_policy(gck_frame *frame, PyObject *policy)
{
    gck_state *state = frame->state;
    PyObject *read, *names, *function;
    int ok;

    if (policy == Py_None) {
        return 0;
    }
    read = PyObject_CallMethod(state->py.selection, "selective_policy", "(O)", policy);
    if (read == NULL) {
        return -1;
    }
    ok = PyArg_ParseTuple(read, "O!O", state->Names, &names, &function);
    if (ok && (((gck_names *)names)->n > 0 || function != Py_None)) {
        frame->store = gck_store_new(state, (gck_names *)names, 0, 0);
        frame->policy_fn = function != Py_None ? Py_NewRef(function) : NULL;
        ok = frame->store != NULL;
    }
    Py_DECREF(read);
    return ok ? 0 : -1;
}

static int any_requires_grad(const gck_py *py, PyObject *list, Py_ssize_t from)
{
    int grad = 0;

    for (Py_ssize_t i = from; grad == 0 && i < PyList_Size(list); i++) {
        grad = gck_attr_is_true(PyList_GetItem(list, i), py->names.requires_grad);
    }
    return grad;
}

/* New reference: [frame, tensors among the leaves, hidden parameters]; the frame's entries
 * say which leaves are tensors. */
static PyObject *gather(gck_frame *frame, PyObject *leaves)
{
    const gck_py *py = &frame->state->py;
    PyObject *inputs = PyList_New(0), *hidden;
    const Py_ssize_t n = PyList_Size(leaves);
    int status = inputs == NULL ? -1 : PyList_Append(inputs, (PyObject *)frame);

    frame->args = calloc((size_t)n + 1, sizeof(gck_entry));
    if (frame->args == NULL) {
        PyErr_NoMemory();
        status = -1;
    }
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);
        const int tensor = gck_is_tensor(py, leaf);
        frame->nargs = i + 1;
        status = tensor > 0 ? PyList_Append(inputs, leaf) : tensor;
        if (status == 0) {
            frame->args[i] = (gck_entry){GCK_KEPT, tensor ? NULL : Py_NewRef(leaf), 0, 0, NULL, 0};
        }
    }
    PyObject *module = status == 0 ? gck_module_behind(py, frame->function) : NULL;
    frame->known_leaves = module != NULL;
    hidden = status == 0 ? gck_parameters_of(py, module) : NULL;
    for (Py_ssize_t i = 0; hidden != NULL && status == 0 && i < PyList_Size(hidden); i++) {
        status = PyList_Append(inputs, PyList_GetItem(hidden, i));
    }
    Py_XDECREF(frame->hidden);
    frame->hidden = hidden;
    if (status < 0 || hidden == NULL) {
        Py_CLEAR(inputs);
    }
    return inputs;
}

static int refuse_functorch(const gck_py *py)
{
    const int active = gck_functorch_active(py);

    if (active > 0) {
        PyErr_SetString(PyExc_RuntimeError, "gradckpt.SelectiveRecompute does not work under torch.func transforms; call "
                                            "them inside the region, or use gradckpt.checkpoint without them");
    }
    return active == 0 ? 0 : -1;
}

/* Through autograd's own apply; its Python wrapper only looks for functorch. */
static PyObject *through_autograd(gck_frame *frame, PyObject *inputs)
{
    gck_state *state = frame->state;
    PyObject *all = PyList_AsTuple(inputs);
    PyObject *tensors = all != NULL ? PyObject_Call(state->selective_apply, all, NULL) : NULL;   /* a tuple, as forward's */
    PyObject *result = tensors != NULL ? gck_leaves_assemble(frame, tensors) : NULL;

    Py_XDECREF(all);
    Py_XDECREF(tensors);
    return result;
}

static PyObject *run_region(PyObject *module, PyObject *args, PyObject *kwargs)
{
    gck_state *state = gck_state_of(module);
    const Py_ssize_t nargs = PyTuple_Size(args) - 2;
    PyObject *own = kwargs != NULL ? PyDict_Copy(kwargs) : NULL, *rest = own, *leaves = NULL, *inputs = NULL;
    PyObject *result = NULL, *tuple = nargs >= 0 ? PyTuple_GetSlice(args, 2, nargs + 2) : NULL;
    gck_frame *frame = NULL;
    int grad = 0;

    if (nargs < 0) {
        PyErr_SetString(PyExc_TypeError, "SelectiveRecompute.apply(function, policy, *args) takes a function and a policy");
        goto exit;
    }
    frame = gck_frame_new(state);
    if (tuple == NULL || frame == NULL || (kwargs != NULL && own == NULL)
        || take_options(state, &rest, &frame->plan) < 0 || refuse_functorch(&state->py) < 0) {
        goto exit;
    }
    frame->function = Py_NewRef(PyTuple_GetItem(args, 0));
    if (!gck_torch.aoti_torch_grad_mode_is_enabled()) {
        result = PyObject_Call(frame->function, tuple, rest);
        goto exit;
    }
    leaves = gck_leaves_flatten(&state->py, tuple, rest, &frame->spec);
    if (leaves == NULL || take_policy(frame, PyTuple_GetItem(args, 1)) < 0 || (inputs = gather(frame, leaves)) == NULL
        || (grad = any_requires_grad(&state->py, inputs, 1)) < 0) {
        goto exit;
    }
    if (!grad && PyErr_WarnEx(PyExc_UserWarning, "None of the inputs have requires_grad=True. Gradients will be None", 1) < 0) {
        goto exit;
    }
    frame->buffers_once = 1;
    result = through_autograd(frame, inputs);

exit:
    Py_XDECREF(tuple);
    Py_XDECREF(own);
    Py_XDECREF(leaves);
    Py_XDECREF(inputs);
    Py_XDECREF((PyObject *)frame);
    return result;
}

/* The forward uncompiled. */
static PyObject *apply(PyObject *module, PyObject *args, PyObject *kwargs)
{
    const gck_py *py = &gck_state_of(module)->py;
    PyObject *dynamo, *result;

    if (gck_dynamo_off(py, &dynamo) < 0) {
        return NULL;
    }
    result = run_region(module, args, kwargs);
    gck_dynamo_restore(py, dynamo);
    return result;
}

/* ---- forward ---- */

/* New reference: the leaves of the call; tensors out of `tensors`, in order. */
static PyObject *fill_leaves(gck_frame *frame, PyObject *const *tensors)
{
    PyObject *list = PyList_New(0);
    Py_ssize_t next = 0;

    for (Py_ssize_t i = 0; list != NULL && i < frame->nargs; i++) {
        PyObject *value = frame->args[i].value != NULL ? frame->args[i].value : tensors[next++];
        if (PyList_Append(list, value) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Inputs into payloads where the plan says so, the others into autograd's hands.  *aliases:
 * to be cleared by the caller. */
static int keep_inputs(gck_frame *frame, PyObject *ctx, PyObject *const *tensors, gck_aliases *aliases)
{
    gck_packing packing = {frame->state, frame->plan, 0, 0, NULL, {NULL, NULL, 0, NULL}};
    PyObject *list = PyList_New(0), *tuple, *method, *done = NULL;
    gck_batch batch;
    Py_ssize_t next = 0;
    int status = list == NULL ? -1 : 0;

    gck_batch_begin(&batch, frame->state, 0);
    packing.batch = &batch;
    for (Py_ssize_t i = 0; status == 0 && i < frame->nargs; i++) {
        if (frame->args[i].value != NULL) {
            continue;
        }
        PyObject *x = tensors[next++];
        const int packed = frame->plan.codec != NULL ? gck_entry_encode(&packing, x, &frame->args[i]) : 0;
        status = packed < 0 ? -1 : packed ? 0 : PyList_Append(list, x);
    }
    if (status < 0) {
        gck_batch_drop(&batch);
    } else {
        status = gck_batch_flush(&batch);
    }
    frame->compressed = packing.payloads;
    *aliases = packing.aliases;
    tuple = status == 0 ? PyList_AsTuple(list) : NULL;
    method = tuple != NULL ? PyObject_GetAttr(ctx, frame->state->py.names.save_for_backward) : NULL;
    done = method != NULL ? PyObject_Call(method, tuple, NULL) : NULL;
    Py_XDECREF(list);
    Py_XDECREF(tuple);
    Py_XDECREF(method);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *gck_run_caught(gck_frame *frame, PyObject *leaves, int replay)
{
    gck_catch caught;
    PyObject *out;

    if (gck_catch_begin(frame->state, &caught, frame->store, frame->policy_fn, replay) < 0) {
        return NULL;
    }
    out = gck_leaves_call(frame, leaves);
    if (gck_catch_end(frame->state, &caught) < 0) {
        Py_CLEAR(out);
    }
    return out;
}

/* forward(ctx, frame, *tensors, *hidden) */
static PyObject *forward(PyObject *module, PyObject *const *all, Py_ssize_t nall)
{
    gck_state *state = gck_state_of(module);
    PyObject *leaves = NULL, *tuple = NULL, *out = NULL, *result = NULL, *done = NULL;
    gck_aliases aliases = {NULL, NULL, 0, NULL};

    if (nall < 2 || Py_TYPE(all[1]) != state->Frame) {
        PyErr_SetString(PyExc_TypeError, "SelectiveRecompute.forward is called by SelectiveRecompute.apply");
        return NULL;
    }
    gck_frame *frame = (gck_frame *)all[1];
    if ((leaves = fill_leaves(frame, all + 2)) == NULL || (tuple = PyList_AsTuple(leaves)) == NULL
        || gck_ambient_capture(&state->py, &frame->ambient, 1, 0, tuple, NULL) < 0
        || keep_inputs(frame, all[0], all + 2, &aliases) < 0
        || PyObject_SetAttr(all[0], state->py.names.frame, (PyObject *)frame) < 0
        || (done = PyObject_CallMethodObjArgs(all[0], state->py.names.set_materialize_grads, Py_False, NULL)) == NULL) {
        goto exit;
    }
    state->stats.regions++;
    if (gck_region_decides(state, frame->compressed > 0 ? frame->plan.decisions : 0, &frame->store) < 0) {
        goto exit;
    }
    out = gck_run_caught(frame, leaves, 0);
    if (out != NULL && frame->compressed > 0 && gck_aliases_check(&aliases, &state->py) < 0) {
        Py_CLEAR(out);
    }
    result = out != NULL ? gck_leaves_tensors(&state->py, out, frame) : NULL;

exit:
    gck_aliases_clear(&aliases);
    Py_XDECREF(leaves);
    Py_XDECREF(tuple);
    Py_XDECREF(out);
    Py_XDECREF(done);
    return result;
}

/* ---- the class ---- */

static PyMethodDef apply_def = {"apply", (PyCFunction)(void (*)(void))apply, METH_VARARGS | METH_KEYWORDS, gck_selective_doc};
static PyMethodDef forward_def = {"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL, NULL};
static PyMethodDef backward_def = {"backward", (PyCFunction)(void (*)(void))gck_selective_backward, METH_FASTCALL, NULL};

PyObject *gck_selective_class(PyObject *module, const gck_py *py)
{
    gck_state *state = gck_state_of(module);
    PyObject *a = PyCFunction_NewEx(&apply_def, module, NULL);
    PyObject *f = gck_dynamo_method(py, &forward_def, module);
    PyObject *b = gck_dynamo_method(py, &backward_def, module);
    PyObject *attributes = a && f && b ? Py_BuildValue("{sOsOsOssss}", "apply", a, "forward", f, "backward", b, "__module__",
                                                       "gradckpt", "__doc__", gck_selective_doc) : NULL;
    PyObject *class = attributes ? PyObject_CallFunction((PyObject *)Py_TYPE(py->Function), "s(O)O",
                                                         "SelectiveRecompute", py->Function, attributes) : NULL;
    PyObject *super = class != NULL ? PyObject_CallFunction((PyObject *)&PySuper_Type, "OO", py->Function, class) : NULL;

    state->selective_apply = super != NULL ? PyObject_GetAttrString(super, "apply") : NULL;
    if (state->selective_apply == NULL) {
        Py_CLEAR(class);
    }
    Py_XDECREF(super);
    Py_XDECREF(a);
    Py_XDECREF(f);
    Py_XDECREF(b);
    Py_XDECREF(attributes);
    return class;
}
