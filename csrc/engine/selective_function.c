/* selective_function.c: SelectiveRecompute, an autograd Function whose apply, forward and
 * backward are C.
 *
 * Forward runs the region without a graph and keeps its inputs and what the policy names;
 * backward runs it again on detached inputs, gets the kept outputs back instead of running
 * their operators, and differentiates that.  The parameters of a module are inputs of the
 * node, so it returns their gradients and needs no hook of anybody's. */
#include "selective_function.h"

#include "options.h"
#include "rerun.h"

#include <stdlib.h>
#include <string.h>

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

/* ---- what a call consists of ---- */

static int any_container(gck_py *py, PyObject *const *args, Py_ssize_t nargs)
{
    for (Py_ssize_t i = 0; i < nargs; i++) {
        if (PyTuple_Check(args[i]) || PyList_Check(args[i]) || PyDict_Check(args[i])) {
            return 1;
        }
        const int known = gck_is_tensor(py, args[i]) > 0 ? 0 : PyDict_Contains(py->supported_nodes,
                                                                              (PyObject *)Py_TYPE(args[i]));
        if (known != 0) {
            PyErr_Clear();
            return known > 0;
        }
    }
    return 0;
}

/* New reference: the leaves as a list; *spec: how they belong together, NULL when they are the
 * arguments themselves. */
static PyObject *flatten(gck_py *py, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs, PyObject **spec)
{
    PyObject *tuple = gck_tuple(args, nargs), *leaves = NULL, *both = NULL, *flat = NULL;

    *spec = NULL;
    if (tuple == NULL) {
        return NULL;
    }
    if (kwargs == NULL && !any_container(py, args, nargs)) {
        leaves = PySequence_List(tuple);
    } else if ((both = Py_BuildValue("(ON)", tuple, kwargs ? Py_NewRef(kwargs) : PyDict_New())) != NULL) {
        flat = PyObject_CallFunctionObjArgs(py->tree_flatten, both, NULL);
        if (flat != NULL && PyArg_ParseTuple(flat, "O!O", &PyList_Type, &leaves, spec)) {
            Py_INCREF(leaves);
            Py_INCREF(*spec);
        }
    }
    Py_XDECREF(tuple);
    Py_XDECREF(both);
    Py_XDECREF(flat);
    return leaves;
}

/* Call the function with these leaves. */
static PyObject *call(gck_frame *frame, PyObject *leaves)
{
    PyObject *args = NULL, *kwargs = NULL, *both = NULL, *result = NULL;

    if (frame->spec == NULL) {
        args = PyList_AsTuple(leaves);
        result = args != NULL ? PyObject_Call(frame->function, args, NULL) : NULL;
        Py_XDECREF(args);
        return result;
    }
    both = PyObject_CallFunctionObjArgs(frame->state->py.tree_unflatten, leaves, frame->spec, NULL);
    if (both != NULL && PyArg_ParseTuple(both, "OO", &args, &kwargs)) {
        result = PyObject_Call(frame->function, args, kwargs);
    }
    Py_XDECREF(both);
    return result;
}

/* The tensors among the leaves of what came out, as a new tuple.  `rest`, if asked for: the
 * leaves with None in their places, and the spec; NULL for a single tensor. */
static PyObject *tensors_of(gck_py *py, PyObject *out, PyObject **rest)
{
    PyObject *flat, *leaves, *spec, *tensors = NULL, *result = NULL;
    const int single = gck_is_tensor(py, out);

    if (single != 0) {
        return single < 0 ? NULL : PyTuple_Pack(1, out);
    }
    flat = PyObject_CallFunctionObjArgs(py->tree_flatten, out, NULL);
    if (flat == NULL || !PyArg_ParseTuple(flat, "O!O", &PyList_Type, &leaves, &spec)
        || (tensors = PyList_New(0)) == NULL) {
        Py_XDECREF(flat);
        return NULL;
    }
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);
        const int tensor = gck_is_tensor(py, leaf);
        status = tensor > 0 ? PyList_Append(tensors, leaf) : tensor;
        if (status == 0 && tensor) {
            status = PyList_SetItem(leaves, i, Py_NewRef(Py_None));   /* takes over the reference */
        }
    }
    if (status == 0 && rest != NULL) {
        *rest = Py_NewRef(flat);
    }
    result = status == 0 ? PyList_AsTuple(tensors) : NULL;
    Py_DECREF(flat);
    Py_DECREF(tensors);
    return result;
}

/* ---- parameters ---- */

/* Borrowed: the module whose code the function is; NULL: it is another callable. */
static PyObject *module_behind(const gck_py *py, PyObject *function)
{
    PyObject *owner;

    while (PyObject_IsInstance(function, py->partial) == 1) {
        PyObject *inner = PyObject_GetAttrString(function, "func");
        if (inner == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_DECREF(inner);                        /* the partial holds it */
        function = inner;
    }
    if (PyObject_IsInstance(function, py->Module) == 1) {
        return function;
    }
    owner = PyObject_GetAttrString(function, "__self__");
    PyErr_Clear();
    Py_XDECREF(owner);                           /* the method holds it */
    return owner != NULL && PyObject_IsInstance(owner, py->Module) == 1 ? owner : NULL;
}

/* Those of module and its children that require grad, each once.  0 or -1. */
static int collect_parameters(const gck_py *py, PyObject *module, PyObject *list, PyObject *seen)
{
    static const char *const names[] = {"_parameters", "_modules"};

    for (int k = 0; k < 2; k++) {
        PyObject *dict = PyObject_GetAttrString(module, names[k]), *value;
        Py_ssize_t at = 0;
        int status = dict != NULL && PyDict_Check(dict) ? 0 : -1;
        while (status == 0 && PyDict_Next(dict, &at, NULL, &value)) {
            if (value == Py_None || (status = PySet_Contains(seen, value)) != 0) {
                status = status > 0 ? 0 : status;
                continue;
            }
            status = PySet_Add(seen, value);
            if (status == 0 && k == 1) {
                status = collect_parameters(py, value, list, seen);
            } else if (status == 0) {
                const int grad = gck_attr_is_true(value, py->names.requires_grad);
                status = grad > 0 ? PyList_Append(list, value) : grad;
            }
        }
        Py_XDECREF(dict);
        if (status < 0) {
            return -1;
        }
    }
    return 0;
}

/* New reference: list of hidden inputs; empty for other callables. */
static PyObject *parameters_of(const gck_py *py, PyObject *module)
{
    PyObject *list = PyList_New(0), *seen = PySet_New(NULL);

    if (list == NULL || seen == NULL || (module != NULL && collect_parameters(py, module, list, seen) < 0)) {
        Py_CLEAR(list);
    }
    Py_XDECREF(seen);
    return list;
}

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
    read = PyObject_CallMethod(state->py.shim, "selective_policy", "(O)", policy);
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
    PyObject *module = status == 0 ? module_behind(py, frame->function) : NULL;
    frame->known_leaves = module != NULL;
    hidden = status == 0 ? parameters_of(py, module) : NULL;
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

/* Values of a call from its tensors, which autograd has made its own. */
static PyObject *assemble(gck_frame *frame, PyObject *tensors)
{
    PyObject *leaves, *spec, *list, *result = NULL;
    Py_ssize_t next = 0;

    if (frame->outputs == NULL) {
        return PySequence_GetItem(tensors, 0);
    }
    if (!PyArg_ParseTuple(frame->outputs, "OO", &leaves, &spec) || (list = PySequence_List(leaves)) == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(list) && next < PySequence_Size(tensors); i++) {
        if (frame->tensor_at[i]) {
            PyList_SetItem(list, i, PySequence_GetItem(tensors, next++));
        }
    }
    result = PyObject_CallFunctionObjArgs(frame->state->py.tree_unflatten, list, spec, NULL);
    Py_DECREF(list);
    return result;
}

static int refuse_functorch(const gck_py *py)
{
    PyObject *level = py->peek_functorch != NULL ? PyObject_CallNoArgs(py->peek_functorch) : Py_NewRef(Py_None);
    const int active = level == NULL ? -1 : level != Py_None;

    Py_XDECREF(level);
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
    PyObject *tensors = all != NULL ? PyObject_Call(state->selective_apply, all, NULL) : NULL, *result = NULL, *tuple;

    Py_XDECREF(all);
    if (tensors == NULL) {
        return NULL;
    }
    if (frame->outputs == NULL || PyTuple_Check(tensors)) {
        tuple = PyTuple_Check(tensors) ? Py_NewRef(tensors) : PyTuple_Pack(1, tensors);
        result = tuple != NULL ? assemble(frame, tuple) : NULL;
        Py_XDECREF(tuple);
    }
    Py_DECREF(tensors);
    return result;
}

static PyObject *apply(PyObject *module, PyObject *args, PyObject *kwargs)
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
    PyObject *items[64], **all = nargs <= 64 ? items : malloc(sizeof *all * (size_t)nargs);
    for (Py_ssize_t i = 0; all != NULL && i < nargs; i++) {
        all[i] = PyTuple_GetItem(tuple, i);
    }
    leaves = all != NULL ? flatten(&state->py, all, nargs, rest, &frame->spec) : PyErr_NoMemory();
    if (all != items) {
        free(all);
    }
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

/* Inputs into payloads where the plan says so, the others into autograd's hands. */
static int keep_inputs(gck_frame *frame, PyObject *ctx, PyObject *const *tensors)
{
    gck_packing packing = {frame->state, frame->plan, 0, 0, NULL};
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
    tuple = status == 0 ? PyList_AsTuple(list) : NULL;
    method = tuple != NULL ? PyObject_GetAttrString(ctx, "save_for_backward") : NULL;
    done = method != NULL ? PyObject_Call(method, tuple, NULL) : NULL;
    Py_XDECREF(list);
    Py_XDECREF(tuple);
    Py_XDECREF(method);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Which leaves of the output are tensors: autograd gets those. */
static int note_outputs(gck_frame *frame, PyObject *out)
{
    PyObject *leaves, *spec;

    if (frame->outputs == NULL) {
        return 0;
    }
    if (!PyArg_ParseTuple(frame->outputs, "OO", &leaves, &spec)) {
        return -1;
    }
    PyObject *flat = PyObject_CallFunctionObjArgs(frame->state->py.tree_flatten, out, NULL);
    PyObject *whole = flat != NULL ? PyTuple_GetItem(flat, 0) : NULL;
    const Py_ssize_t n = PyList_Size(leaves);
    frame->tensor_at = calloc((size_t)n + 1, 1);
    for (Py_ssize_t i = 0; whole != NULL && frame->tensor_at != NULL && i < n; i++) {
        frame->tensor_at[i] = gck_is_tensor(&frame->state->py, PyList_GetItem(whole, i)) > 0;
    }
    Py_XDECREF(flat);
    return whole == NULL || frame->tensor_at == NULL ? -1 : 0;
}

/* Run it, caught as the policy wants, without a graph. */
static PyObject *run_caught(gck_frame *frame, PyObject *leaves, int replay)
{
    gck_catch caught;
    PyObject *out;

    if (gck_catch_begin(frame->state, &caught, frame->store, frame->policy_fn, replay) < 0) {
        return NULL;
    }
    out = call(frame, leaves);
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

    if (nall < 2 || Py_TYPE(all[1]) != state->Frame) {
        PyErr_SetString(PyExc_TypeError, "SelectiveRecompute.forward is called by SelectiveRecompute.apply");
        return NULL;
    }
    gck_frame *frame = (gck_frame *)all[1];
    if ((leaves = fill_leaves(frame, all + 2)) == NULL || (tuple = PyList_AsTuple(leaves)) == NULL
        || gck_ambient_capture(&state->py, &frame->ambient, 1, 0, tuple, NULL) < 0
        || keep_inputs(frame, all[0], all + 2) < 0 || PyObject_SetAttrString(all[0], "frame", (PyObject *)frame) < 0
        || (done = PyObject_CallMethod(all[0], "set_materialize_grads", "O", Py_False)) == NULL) {
        goto exit;
    }
    state->stats.regions++;
    out = run_caught(frame, leaves, 0);
    result = out != NULL ? tensors_of(&state->py, out, &frame->outputs) : NULL;
    if (result != NULL && note_outputs(frame, out) < 0) {
        Py_CLEAR(result);
    }

exit:
    Py_XDECREF(leaves);
    Py_XDECREF(tuple);
    Py_XDECREF(out);
    Py_XDECREF(done);
    return result;
}

/* ---- backward ---- */

/* New reference: x without history, requiring grad when x does. */
static PyObject *detached(const gck_py *py, PyObject *x)
{
    PyObject *copy = PyObject_CallMethodObjArgs(x, py->names.detach, NULL);
    PyObject *grad = copy != NULL ? PyObject_GetAttr(x, py->names.requires_grad) : NULL;

    if (grad == NULL || PyObject_SetAttr(copy, py->names.requires_grad, grad) < 0) {
        Py_CLEAR(copy);
    }
    Py_XDECREF(grad);
    return copy;
}

/* New reference: the leaves for the recompute; what waits in `batch` is done at its end. */
static PyObject *restore_leaves(gck_frame *frame, PyObject *saved, gck_batch *batch)
{
    PyObject *list = PyList_New(0);
    Py_ssize_t next = 0;

    for (Py_ssize_t i = 0; list != NULL && i < frame->nargs; i++) {
        const gck_entry *entry = &frame->args[i];
        PyObject *value = NULL;
        if (entry->value == NULL) {
            PyObject *x = PyTuple_GetItem(saved, next++);
            value = x != NULL ? detached(&frame->state->py, x) : NULL;
        } else if (entry->kind == GCK_PAYLOAD) {
            PyObject *x = gck_payload_restore((gck_payload *)entry->value, batch);
            value = x != NULL ? detached(&frame->state->py, x) : NULL;
            Py_XDECREF(x);
        } else {
            value = Py_NewRef(entry->value);
        }
        if (value == NULL || PyList_Append(list, value) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(value);
    }
    if (list == NULL) {
        gck_batch_drop(batch);
    } else if (gck_batch_flush(batch) < 0) {
        Py_CLEAR(list);
    }
    return list;
}

/* The region again, with grad.  New reference: its tensors; *leaves: new reference. */
static PyObject *run_again(gck_frame *frame, PyObject *saved, PyObject **leaves)
{
    PyObject *out = NULL, *tensors;
    gck_rerun rerun;
    gck_batch batch;

    gck_batch_begin(&batch, frame->state, 1);
    if ((*leaves = restore_leaves(frame, saved, &batch)) == NULL || gck_rerun_begin(frame, &rerun) < 0) {
        return NULL;
    }
    frame->state->stats.recomputes++;
    out = run_caught(frame, *leaves, 1);
    if (gck_rerun_end(frame, &rerun) < 0) {
        Py_CLEAR(out);
    }
    tensors = out != NULL ? tensors_of(&frame->state->py, out, NULL) : NULL;
    Py_XDECREF(out);
    return tensors;
}

/* Outputs that require grad and what came in for them.  Number of them, or -1. */
static Py_ssize_t pair_outputs(const gck_py *py, PyObject *tensors, PyObject *const *grads, Py_ssize_t ngrads,
                               PyObject **roots, PyObject **root_grads)
{
    PyObject *r = PyList_New(0), *g = PyList_New(0);
    const Py_ssize_t n = PyTuple_Size(tensors);
    Py_ssize_t count = r == NULL || g == NULL ? -1 : 0;
    int asked = 0;

    if (count == 0 && n != ngrads) {
        PyErr_Format(PyExc_RuntimeError, "gradckpt.SelectiveRecompute: the region returned %zd tensors in the forward and "
                     "%zd in the recompute", ngrads, n);
        count = -1;
    }
    for (Py_ssize_t i = 0; count >= 0 && i < n; i++) {
        PyObject *x = PyTuple_GetItem(tensors, i);
        const int grad = grads[i] == Py_None ? 0 : gck_attr_is_true(x, py->names.requires_grad);
        asked |= grads[i] != Py_None;
        if (grad < 0 || (grad && (PyList_Append(r, x) < 0 || PyList_Append(g, grads[i]) < 0))) {
            count = -1;
        } else {
            count += grad;
        }
    }
    if (count == 0 && asked) {
        PyErr_SetString(PyExc_RuntimeError, "none of output has requires_grad=True, this checkpoint() is not necessary");
        count = -1;
    }
    *roots = count > 0 ? PyList_AsTuple(r) : NULL;
    *root_grads = count > 0 ? PyList_AsTuple(g) : NULL;
    Py_XDECREF(r);
    Py_XDECREF(g);
    return count > 0 && (*roots == NULL || *root_grads == NULL) ? -1 : count;
}

/* New reference: list of inputs to differentiate by: leaves that require grad, then parameters. */
static PyObject *targets_of(gck_frame *frame, PyObject *leaves)
{
    const gck_py *py = &frame->state->py;
    PyObject *list = PyList_New(0);

    for (Py_ssize_t i = 0; list != NULL && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);
        int grad = gck_is_tensor(py, leaf);
        grad = grad > 0 ? gck_attr_is_true(leaf, py->names.requires_grad) : grad;
        if (grad < 0 || (grad && PyList_Append(list, leaf) < 0)) {
            Py_CLEAR(list);
        }
    }
    for (Py_ssize_t i = 0; list != NULL && i < PyList_Size(frame->hidden); i++) {
        if (PyList_Append(list, PyList_GetItem(frame->hidden, i)) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* New reference: gradients of the targets, as a tuple. */
static PyObject *differentiate(gck_frame *frame, PyObject *roots, PyObject *grads, PyObject *targets)
{
    const gck_py *py = &frame->state->py;
    PyObject *inputs = frame->known_leaves ? PyList_AsTuple(targets) : PyTuple_New(0);
    PyObject *done = NULL, *result = NULL;

    if (inputs != NULL && frame->known_leaves) {
        PyObject *checked = PyObject_CallMethod(py->shim, "check_leaves", "OOO", frame->function, roots, targets);
        done = checked != NULL && PyTuple_Size(inputs) == 0 ? PyTuple_New(0) : checked == NULL ? NULL
             : PyObject_CallFunction(py->run_backward, "OOOOOOO", roots, grads, Py_False, Py_False, inputs, Py_True,
                                     Py_False);
        Py_XDECREF(checked);
        result = Py_XNewRef(done);
    } else if (inputs != NULL) {
        done = PyObject_CallFunction(py->run_backward, "OOOOOOO", roots, grads, Py_False, Py_False, inputs, Py_True,
                                     Py_True);
        PyObject *list = done != NULL ? PyList_New(0) : NULL;
        for (Py_ssize_t i = 0; list != NULL && i < PyList_Size(targets); i++) {
            PyObject *grad = PyObject_GetAttrString(PyList_GetItem(targets, i), "grad");
            if (grad == NULL || PyList_Append(list, grad) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(grad);
        }
        result = list != NULL ? PyList_AsTuple(list) : NULL;
        Py_XDECREF(list);
    }
    Py_XDECREF(inputs);
    Py_XDECREF(done);
    return result;
}

/* New reference: x, with a history that raises: who differentiates it hears why. */
static PyObject *barred(const gck_py *py, PyObject *x)
{
    PyObject *node, *result;

    if (x == Py_None) {
        return Py_NewRef(x);
    }
    node = PyObject_CallMethod(py->functions, "DelayedError", "si",
                               "gradckpt.SelectiveRecompute is one graph node and has no gradient of its gradient "
                               "(create_graph=True); use gradckpt.checkpoint with context_fn="
                               "gradckpt.create_selective_checkpoint_contexts for that", 1);
    result = node != NULL ? PyObject_CallFunctionObjArgs(node, x, NULL) : NULL;
    Py_XDECREF(node);
    return result;
}

/* New reference: (None for the frame, gradients in the order of the node's inputs). */
static PyObject *collect(gck_frame *frame, PyObject *leaves, PyObject *grads)
{
    const gck_py *py = &frame->state->py;
    const int graph = gck_torch.aoti_torch_grad_mode_is_enabled();
    PyObject *list = PyList_New(0), *result = NULL;
    Py_ssize_t next = 0;
    int status = list == NULL ? -1 : PyList_Append(list, Py_None);

    for (Py_ssize_t i = 0; status == 0 && i < frame->nargs + PyList_Size(frame->hidden); i++) {
        PyObject *leaf = i < frame->nargs ? PyList_GetItem(leaves, i) : NULL, *grad = Py_None;
        int wants = leaf != NULL ? gck_is_tensor(py, leaf) : 1;
        if (leaf != NULL && wants == 0) {
            continue;                            /* no tensor: not among the node's inputs */
        }
        wants = leaf != NULL && wants > 0 ? gck_attr_is_true(leaf, py->names.requires_grad) : wants;
        if (wants > 0 && grads != NULL) {
            grad = PyTuple_GetItem(grads, next++);
        }
        grad = wants < 0 || grad == NULL ? NULL : graph ? barred(py, grad) : Py_NewRef(grad);
        status = grad != NULL ? PyList_Append(list, grad) : -1;
        Py_XDECREF(grad);
    }
    if (status == 0) {
        result = PyList_AsTuple(list);
    }
    Py_XDECREF(list);
    return result;
}

static int check_valid(const gck_frame *frame)
{
    const gck_py *py = &frame->state->py;
    const int truth = frame->known_leaves ? 1 : gck_ask(py->is_checkpoint_valid);

    if (truth == 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "gradckpt.SelectiveRecompute: with a callable that is no module, .grad() and backward(inputs=...) "
                        "are not possible: tensors that it uses besides its arguments are not known. Pass the module "
                        "itself, a bound method or a functools.partial of it, or use gradckpt.checkpoint with context_fn=");
    }
    return truth > 0 ? 0 : -1;
}

/* backward(ctx, *grads) */
static PyObject *backward(PyObject *module, PyObject *const *all, Py_ssize_t nall)
{
    gck_state *state = gck_state_of(module);
    const gck_py *py = &state->py;
    PyObject *frame = nall >= 1 ? PyObject_GetAttrString(all[0], "frame") : NULL;
    PyObject *saved = NULL, *leaves = NULL, *tensors = NULL, *roots = NULL, *root_grads = NULL, *targets = NULL;
    PyObject *grads = NULL, *result = NULL;
    Py_ssize_t count;

    if (frame == NULL || Py_TYPE(frame) != state->Frame || ((gck_frame *)frame)->args == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError, "gradckpt: this checkpointed region was already collected as garbage");
        }
        goto exit;
    }
    if (check_valid((gck_frame *)frame) < 0 || (saved = PyObject_GetAttrString(all[0], "saved_tensors")) == NULL
        || (tensors = run_again((gck_frame *)frame, saved, &leaves)) == NULL
        || (count = pair_outputs(py, tensors, all + 1, nall - 1, &roots, &root_grads)) < 0) {
        goto exit;
    }
    Py_CLEAR(saved);
    Py_CLEAR(tensors);
    if (count > 0 && ((targets = targets_of((gck_frame *)frame, leaves)) == NULL
                      || (grads = differentiate((gck_frame *)frame, roots, root_grads, targets)) == NULL)) {
        goto exit;
    }
    result = collect((gck_frame *)frame, leaves, grads);

exit:
    Py_XDECREF(frame);
    Py_XDECREF(saved);
    Py_XDECREF(leaves);
    Py_XDECREF(tensors);
    Py_XDECREF(roots);
    Py_XDECREF(root_grads);
    Py_XDECREF(targets);
    Py_XDECREF(grads);
    return result;
}

/* ---- the class ---- */

static PyMethodDef apply_def = {"apply", (PyCFunction)(void (*)(void))apply, METH_VARARGS | METH_KEYWORDS, gck_selective_doc};
static PyMethodDef forward_def = {"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL, NULL};
static PyMethodDef backward_def = {"backward", (PyCFunction)(void (*)(void))backward, METH_FASTCALL, NULL};

PyObject *gck_selective_class(PyObject *module, const gck_py *py)
{
    gck_state *state = gck_state_of(module);
    PyObject *a = PyCFunction_NewEx(&apply_def, module, NULL);
    PyObject *f = PyCFunction_NewEx(&forward_def, module, NULL);
    PyObject *b = PyCFunction_NewEx(&backward_def, module, NULL);
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
