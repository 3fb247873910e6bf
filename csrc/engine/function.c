/* function.c: CheckpointFunction, an autograd Function whose forward and backward are C.
 *
 * Forward runs the region without a graph and keeps its tensor arguments in autograd's
 * saved tensors; backward runs it again on detached copies, with grad, and starts a
 * backward of its own ("reentrant").  Semantics, texts and names in profiles are those of
 * torch.utils.checkpoint.CheckpointFunction. */
#include "function.h"

#include "../torch/dynamo.h"
#include "rerun.h"

#include <stdlib.h>

/* ---- forward ---- */

/* Arguments into entries: a tensor's is empty, to be filled from ctx.saved_tensors.
 * Returns the tensors as a new tuple, or NULL. */
static PyObject *keep_arguments(gck_frame *frame, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *list = PyList_New(0), *tuple;

    frame->args = calloc((size_t)nargs + 1, sizeof(gck_entry));
    if (list == NULL || frame->args == NULL) {
        Py_XDECREF(list);
        return PyErr_NoMemory();
    }
    frame->nargs = nargs;
    for (Py_ssize_t i = 0; i < nargs; i++) {
        const int tensor = gck_is_tensor(&frame->state->py, args[i]);
        if (tensor < 0 || (tensor && PyList_Append(list, args[i]) < 0)) {
            Py_DECREF(list);
            return NULL;
        }
        frame->args[i] = (gck_entry){GCK_KEPT, tensor ? NULL : Py_NewRef(args[i]), 0, 0, NULL, 0};
    }
    tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    return tuple;
}

static int warn_without_grad(const gck_py *py, PyObject *const *args, Py_ssize_t nargs)
{
    for (Py_ssize_t i = 0; i < nargs; i++) {
        int grad = gck_is_tensor(py, args[i]);
        if (grad > 0) {
            grad = gck_attr_is_true(args[i], py->names.requires_grad);
        }
        if (grad != 0) {
            return grad < 0 ? -1 : 0;
        }
    }
    return PyErr_WarnEx(PyExc_UserWarning, "None of the inputs have requires_grad=True. Gradients will be None", 1);
}

static int save_for_backward(PyObject *ctx, PyObject *tensors)
{
    PyObject *method = PyObject_GetAttrString(ctx, "save_for_backward");
    PyObject *result = method != NULL ? PyObject_Call(method, tensors, NULL) : NULL;

    Py_XDECREF(method);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* forward(ctx, function, (preserve_rng_state, exact, buffers once), *args) */
static PyObject *forward(PyObject *module, PyObject *const *all, Py_ssize_t nall)
{
    gck_state *state = gck_state_of(module);
    gck_frame *frame = NULL;
    PyObject *tuple = NULL, *tensors = NULL, *result = NULL;
    PyObject *const *args = all + 3;
    const Py_ssize_t nargs = nall - 3;
    int preserve, exact;

    if (nall < 3) {
        PyErr_SetString(PyExc_TypeError, "CheckpointFunction is called by gradckpt.checkpoint(use_reentrant=True)");
        return NULL;
    }
    frame = gck_frame_new(state);
    if (frame == NULL || !PyArg_ParseTuple(all[2], "ppp", &preserve, &exact, &frame->buffers_once)
        || warn_without_grad(&state->py, args, nargs) < 0 || (tuple = gck_tuple(args, nargs)) == NULL) {
        goto exit;
    }
    frame->function = Py_NewRef(all[1]);
    if (gck_ambient_capture(&state->py, &frame->ambient, preserve, exact, tuple, NULL) < 0
        || (tensors = keep_arguments(frame, args, nargs)) == NULL || save_for_backward(all[0], tensors) < 0
        || PyObject_SetAttrString(all[0], "frame", (PyObject *)frame) < 0) {
        goto exit;
    }
    Py_CLEAR(frame->ambient.device);             /* torch's reentrant form does not enter it again */
    state->stats.regions++;
    result = PyObject_Call(frame->function, tuple, NULL);     /* autograd has switched grad mode off */

exit:
    Py_XDECREF(tuple);
    Py_XDECREF(tensors);
    Py_XDECREF((PyObject *)frame);
    return result;
}

/* ---- backward ---- */

/* New reference: the arguments for the recompute. */
static PyObject *restore_arguments(gck_frame *frame, PyObject *saved)
{
    PyObject *list = PyList_New(0), *args = NULL;
    Py_ssize_t next = 0;
    int status = list == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; status == 0 && i < frame->nargs; i++) {
        PyObject *value = frame->args[i].value;
        if (value == NULL) {
            PyObject *tensor = PyTuple_GetItem(saved, next++);
            value = tensor != NULL ? gck_rerun_input(&frame->state->py, tensor) : NULL;
        } else {
            Py_INCREF(value);
        }
        status = value != NULL ? PyList_Append(list, value) : -1;
        Py_XDECREF(value);
    }
    if (status == 0) {
        args = PyList_AsTuple(list);
    }
    Py_XDECREF(list);
    return args;
}

/* Run again with grad.  New reference: the outputs as a sequence; *args: new reference. */
static PyObject *run_again(gck_frame *frame, PyObject *saved, PyObject **args)
{
    PyObject *outputs = NULL, *tuple;
    gck_rerun rerun;

    if (gck_rerun_begin(frame, &rerun) < 0) {
        return NULL;
    }
    frame->state->stats.recomputes++;
    *args = restore_arguments(frame, saved);
    if (*args != NULL) {
        outputs = PyObject_Call(frame->function, *args, NULL);
    }
    if (gck_rerun_end(frame, &rerun) < 0) {
        Py_CLEAR(outputs);
    }
    const int single = outputs == NULL ? 0 : gck_is_tensor(&frame->state->py, outputs);
    if (single <= 0) {
        if (single < 0) {
            Py_CLEAR(outputs);
        }
        return outputs;
    }
    tuple = PyTuple_Pack(1, outputs);
    Py_DECREF(outputs);
    return tuple;
}

/* The outputs that require grad and what came in for them, as two new lists.  0 or -1. */
static int pair_outputs(const gck_py *py, PyObject *outputs, PyObject *const *grads, Py_ssize_t ngrads,
                        PyObject **roots, PyObject **root_grads)
{
    const Py_ssize_t n = PySequence_Size(outputs);

    *roots = PyList_New(0);
    *root_grads = PyList_New(0);
    if (n < 0 || *roots == NULL || *root_grads == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *out = PySequence_GetItem(outputs, i);
        int grad = out == NULL ? -1 : gck_is_tensor(py, out);
        if (grad > 0) {
            grad = gck_attr_is_true(out, py->names.requires_grad);
        }
        if (grad > 0 && i >= ngrads) {
            PyErr_SetString(PyExc_IndexError, "tuple index out of range");
            grad = -1;
        }
        if (grad < 0 || (grad && (PyList_Append(*roots, out) < 0 || PyList_Append(*root_grads, grads[i]) < 0))) {
            Py_XDECREF(out);
            return -1;
        }
        Py_DECREF(out);
    }
    if (PyList_Size(*roots) == 0) {
        PyErr_SetString(PyExc_RuntimeError, "none of output has requires_grad=True, this checkpoint() is not necessary");
        return -1;
    }
    return 0;
}

/* New reference: (None, None, *gradients of the arguments). */
static PyObject *collect_grads(gck_frame *frame, PyObject *args)
{
    PyObject *result = PyTuple_New(frame->nargs + 2);

    for (Py_ssize_t i = 0; result != NULL && i < frame->nargs + 2; i++) {
        PyObject *grad = i < 2 || frame->args[i - 2].value != NULL
            ? Py_NewRef(Py_None) : PyObject_GetAttrString(PyTuple_GetItem(args, i - 2), "grad");
        if (grad == NULL) {
            Py_CLEAR(result);
        } else {
            PyTuple_SetItem(result, i, grad);
        }
    }
    return result;
}

static int check_valid(const gck_py *py)
{
    const int truth = gck_ask(py->is_checkpoint_valid);

    if (truth == 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "When use_reentrant=True, torch.utils.checkpoint is incompatible"
                        " with .grad() or passing an `inputs` parameter to .backward()."
                        " To resolve this error, you can either set use_reentrant=False,"
                        " or call .backward() without passing the `inputs` argument.");
    }
    return truth > 0 ? 0 : -1;
}

/* backward(ctx, *grads) */
static PyObject *backward(PyObject *module, PyObject *const *all, Py_ssize_t nall)
{
    gck_state *state = gck_state_of(module);
    const gck_py *py = &state->py;
    PyObject *frame = NULL, *saved = NULL, *outputs = NULL, *args = NULL, *roots = NULL, *grads = NULL, *done = NULL;
    PyObject *result = NULL;

    if (nall < 1 || check_valid(py) < 0 || (frame = PyObject_GetAttrString(all[0], "frame")) == NULL) {
        return NULL;
    }
    if (Py_TYPE(frame) != state->Frame || ((gck_frame *)frame)->args == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "gradckpt: this checkpointed region was already collected as garbage");
        goto exit;
    }
    saved = PyObject_GetAttrString(all[0], "saved_tensors");
    if (saved == NULL || (outputs = run_again((gck_frame *)frame, saved, &args)) == NULL
        || pair_outputs(py, outputs, all + 1, nall - 1, &roots, &grads) < 0) {
        goto exit;
    }
    Py_CLEAR(saved);
    Py_CLEAR(outputs);
    done = PyObject_CallFunctionObjArgs(py->backward, roots, grads, NULL);
    if (done != NULL) {
        result = collect_grads((gck_frame *)frame, args);
    }

exit:
    Py_XDECREF(frame);
    Py_XDECREF(saved);
    Py_XDECREF(outputs);
    Py_XDECREF(args);
    Py_XDECREF(roots);
    Py_XDECREF(grads);
    Py_XDECREF(done);
    return result;
}

/* ---- the class and the call ---- */

static PyMethodDef forward_def = {"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL, NULL};
static PyMethodDef backward_def = {"backward", (PyCFunction)(void (*)(void))backward, METH_FASTCALL, NULL};

/* The metaclass makes CheckpointFunctionBackward too, so it is called; a type from a spec
 * would not get one. */
PyObject *gck_function_class(PyObject *module, const gck_py *py)
{
    PyObject *f = gck_dynamo_method(py, &forward_def, module);
    PyObject *b = gck_dynamo_method(py, &backward_def, module);
    PyObject *attributes = f && b ? Py_BuildValue("{sOsOss}", "forward", f, "backward", b, "__module__",
                                                  "gradckpt._C") : NULL;
    PyObject *class = attributes ? PyObject_CallFunction((PyObject *)Py_TYPE(py->Function), "s(O)O",
                                                         "CheckpointFunction", py->Function, attributes) : NULL;

    Py_XDECREF(f);
    Py_XDECREF(b);
    Py_XDECREF(attributes);
    return class;
}

/* 0, or -1 with torch's ValueError. */
static int check_options(const gck_state *state, const gck_options *o, PyObject *kwargs)
{
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyObject *comma = PyUnicode_FromString(","), *names = comma ? PyUnicode_Join(comma, kwargs) : NULL;
        if (names != NULL) {
            PyErr_Format(PyExc_ValueError, "Unexpected keyword arguments: %U", names);
        }
        Py_XDECREF(comma);
        Py_XDECREF(names);
        return -1;
    }
    if (gck_options_custom_context(state, o) || (o->debug != NULL && o->debug != Py_False)) {
        PyErr_SetString(PyExc_ValueError, "Passing `context_fn` or `debug` is only supported when use_reentrant=False.");
        return -1;
    }
    if (o->compress != NULL && o->compress != Py_None && o->compress != Py_False) {
        PyErr_SetString(PyExc_ValueError, "gradckpt: compress= needs use_reentrant=False");
        return -1;
    }
    return 0;
}

PyObject *gck_reentrant_call(gck_state *state, const gck_options *o, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwargs)
{
    const int preserve = gck_truth(o->preserve_rng_state, 1);
    PyObject *apply, *all, *result = NULL;

    if (preserve < 0 || check_options(state, o, kwargs) < 0) {
        return NULL;
    }
    apply = PyObject_GetAttrString(state->CheckpointFunction, "apply");
    all = PyTuple_New(nargs + 2);
    if (apply != NULL && all != NULL) {
        PyObject *flags = Py_BuildValue("(iii)", preserve, o->exact, o->once);
        PyTuple_SetItem(all, 0, Py_NewRef(o->function));
        PyTuple_SetItem(all, 1, flags);
        for (Py_ssize_t i = 0; i < nargs; i++) {
            PyTuple_SetItem(all, i + 2, Py_NewRef(args[i]));
        }
        result = flags != NULL ? PyObject_Call(apply, all, NULL) : NULL;
    }
    Py_XDECREF(apply);
    Py_XDECREF(all);
    return result;
}
