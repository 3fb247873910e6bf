/* selective_backward.c: the backward of SelectiveRecompute. */
#include "leaves.h"
#include "parameters.h"
#include "rerun.h"
#include "selective_function.h"

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
            value = x != NULL ? gck_rerun_input(&frame->state->py, x) : NULL;
        } else if (entry->kind == GCK_PAYLOAD) {
            PyObject *x = gck_payload_restore((gck_payload *)entry->value, batch);
            value = x != NULL ? gck_rerun_input(&frame->state->py, x) : NULL;
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
    out = gck_run_caught(frame, *leaves, 1);
    if (gck_rerun_end(frame, &rerun) < 0) {
        Py_CLEAR(out);
    }
    tensors = out != NULL ? gck_leaves_tensors(&frame->state->py, out, NULL) : NULL;
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

/* The hooks of these parameters, taken off: they would see the gradient here, where it is
 * captured, and once more where it is accumulated.  New reference: what restore_hooks needs. */
static PyObject *hide_hooks(PyObject *parameters)
{
    PyObject *hidden = PyList_New(0);

    for (Py_ssize_t i = 0; hidden != NULL && i < PyList_Size(parameters); i++) {
        PyObject *parameter = PyList_GetItem(parameters, i);
        PyObject *hooks = PyObject_GetAttrString(parameter, "_backward_hooks");
        PyObject *row = hooks != NULL && hooks != Py_None ? PyTuple_Pack(2, parameter, hooks) : NULL;
        if (hooks == NULL || (hooks != Py_None && (row == NULL || PyList_Append(hidden, row) < 0
                              || PyObject_SetAttrString(parameter, "_backward_hooks", Py_None) < 0))) {
            PyErr_Clear();                       /* it keeps its hooks */
        }
        Py_XDECREF(hooks);
        Py_XDECREF(row);
    }
    return hidden;
}

/* An exception that is pending survives. */
static void restore_hooks(PyObject *hidden)
{
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    for (Py_ssize_t i = 0; i < PyList_Size(hidden); i++) {
        PyObject *row = PyList_GetItem(hidden, i);
        if (PyObject_SetAttrString(PyTuple_GetItem(row, 0), "_backward_hooks", PyTuple_GetItem(row, 1)) < 0) {
            PyErr_Clear();
        }
    }
    PyErr_Restore(type, value, traceback);
}

/* Once for each module: nothing outside the targets is differentiated by.  0 or -1. */
static int check_leaves(gck_frame *frame, PyObject *roots, PyObject *targets)
{
    gck_state *state = frame->state;
    PyObject *checked;

    if (gck_module_known(state->closed, frame->function)) {
        return 0;
    }
    checked = PyObject_CallMethod(state->py.selection, "check_leaves", "OOO", frame->function, roots, targets);
    Py_XDECREF(checked);
    return checked == NULL ? -1 : gck_module_remember(state, state->closed, frame->function);
}

/* New reference: gradients of the targets, as a tuple. */
static PyObject *differentiate(gck_frame *frame, PyObject *roots, PyObject *grads, PyObject *targets)
{
    const gck_py *py = &frame->state->py;
    PyObject *inputs = frame->known_leaves ? PyList_AsTuple(targets) : PyTuple_New(0);
    PyObject *done = NULL, *result = NULL;

    if (inputs != NULL && frame->known_leaves) {
        PyObject *hooks = check_leaves(frame, roots, targets) < 0 ? NULL : hide_hooks(frame->hidden);
        if (hooks != NULL) {
            done = PyTuple_Size(inputs) == 0 ? PyTuple_New(0)
                 : PyObject_CallFunctionObjArgs(py->run_backward, roots, grads, Py_False, Py_False, inputs, Py_True, Py_False,
                                                NULL);
            restore_hooks(hooks);
        }
        Py_XDECREF(hooks);
        result = Py_XNewRef(done);
    } else if (inputs != NULL) {
        done = PyObject_CallFunctionObjArgs(py->run_backward, roots, grads, Py_False, Py_False, inputs, Py_True, Py_True,
                                            NULL);
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
    PyObject *node, *leaf, *result;

    if (x == Py_None) {
        return Py_NewRef(x);
    }
    /* Of an alias: x may be the very gradient that came in. */
    PyObject *alias = PyObject_CallMethodObjArgs(x, py->names.detach, NULL);
    leaf = alias != NULL ? PyObject_CallMethodObjArgs(alias, py->names.requires_grad_, NULL) : NULL;
    Py_XDECREF(alias);
    node = PyObject_CallMethod(py->functions, "DelayedError", "si",
                               "gradckpt.SelectiveRecompute is one graph node and has no gradient of its gradient "
                               "(create_graph=True); use gradckpt.checkpoint with context_fn="
                               "gradckpt.create_selective_checkpoint_contexts for that", 1);
    result = node != NULL && leaf != NULL ? PyObject_CallFunctionObjArgs(node, leaf, NULL) : NULL;
    Py_XDECREF(leaf);
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
                        "itself, a bound method or a functools.partial of it, or use gradckpt.checkpoint with context_fn="
                        "gradckpt.create_selective_checkpoint_contexts");
    }
    return truth > 0 ? 0 : -1;
}

/* backward(ctx, *grads) */
PyObject *gck_selective_backward(PyObject *module, PyObject *const *all, Py_ssize_t nall)
{
    gck_state *state = gck_state_of(module);
    const gck_py *py = &state->py;
    PyObject *frame = nall >= 1 ? PyObject_GetAttr(all[0], py->names.frame) : NULL;
    PyObject *saved = NULL, *leaves = NULL, *tensors = NULL, *roots = NULL, *root_grads = NULL, *targets = NULL;
    PyObject *grads = NULL, *result = NULL;
    Py_ssize_t count;

    if (frame == NULL || Py_TYPE(frame) != state->Frame || ((gck_frame *)frame)->args == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError, "gradckpt: this checkpointed region was already collected as garbage");
        }
        goto exit;
    }
    if (check_valid((gck_frame *)frame) < 0 || (saved = PyObject_GetAttr(all[0], py->names.saved_tensors)) == NULL
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
