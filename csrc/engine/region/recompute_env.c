/* recompute_env.c: enters and leaves the state in which a region runs again. */
#include "engine/region/recompute_env.h"

#include "torch/abi.h"
#include "torch/calls.h"
#include "torch/ambient.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "engine/state.h"
#include "engine/region/parameters.h"

/* Recomputes in progress on this thread: a fact about a thread, which no object holds. */
static _Thread_local int depth;

PyObject *gck_is_recomputing(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(depth > 0);
}

PyObject *gck_forget_types(PyObject *module, PyObject *Py_UNUSED(unused))
{
    PyDict_Clear(gck_state_of(module)->stateless);
    Py_RETURN_NONE;
}

/* ---- running statistics ---- */

/* 1 when gradckpt._engine.buffers has no rule for modules of this type; 0; -1. */
static int is_stateless(const gck_state *state, PyObject *type)
{
    int has = gck_known(state->stateless, type) ? 0
            : gck_is_true(PyObject_CallFunction(state->py.call.has_buffer_rule, "O", type));

    if (has == 0) {
        gck_remember(state->stateless, type);
    }
    return has < 0 ? -1 : !has;
}

/* New reference: list of the modules whose statistics a recompute restores, with their submodules;
 * NULL without an exception: none. */
static PyObject *roots_of(const gck_frame *frame)
{
    const gck_py *py = &frame->state->py;
    PyObject *module = NULL;

    if (frame->once == NULL || (frame->once == Py_None && Py_TYPE(frame->function) == Py_TYPE(py->noop_context_fn))) {
        return NULL;                             /* a plain function */
    }
    if (frame->once == Py_None && gck_module_behind(py, frame->function, &module) < 0) {
        return NULL;
    }
    return module != NULL ? Py_BuildValue("[N]", module)
                          : PyObject_CallFunction(py->call.buffer_roots, "OO", frame->once, frame->function);
}

/* Remove modules without a rule from the list.  0 or -1. */
static int keep_stateful(const gck_state *state, PyObject *modules)
{
    for (Py_ssize_t i = PyList_Size(modules) - 1; i >= 0; i--) {
        const int stateless = is_stateless(state, (PyObject *)Py_TYPE(PyList_GetItem(modules, i)));
        if (stateless < 0 || (stateless && PyList_SetSlice(modules, i, i + 1, NULL) < 0)) {
            return -1;
        }
    }
    return 0;
}

static int enter_buffers(gck_frame *frame, gck_recompute_env *r)
{
    const gck_state *state = frame->state;
    GCK_SCOPED PyObject *roots = roots_of(frame), *modules = roots != NULL ? gck_modules_of(&state->py, roots) : NULL;

    if (modules != NULL && keep_stateful(state, modules) == 0 && PyList_Size(modules) > 0) {
        r->buffers = PyObject_CallFunction(state->py.call.enter_buffers, "O", modules);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- begin, end ---- */

int gck_recompute_env_begin(gck_frame *frame, gck_recompute_env *r)
{
    gck_py *py = &frame->state->py;

    r->buffers = NULL;
    if (gck_dynamo_off(py, &r->dynamo) < 0) {
        return -1;
    }
    const int entered = gck_ambient_enter(py, &frame->ambient, frame->recompute_context == NULL, &r->surroundings) == 0;
    if (!entered || enter_buffers(frame, r) < 0) {
        if (entered) {
            gck_ambient_leave(py, &r->surroundings);
        }
        gck_dynamo_restore(py, r->dynamo);
        return -1;
    }
    r->grad = gck_torch.aoti_torch_grad_mode_is_enabled();
    gck_torch.aoti_torch_grad_mode_set_enabled(true);
    depth++;
    return 0;
}

int gck_recompute_env_end(gck_frame *frame, gck_recompute_env *r)
{
    gck_error error = gck_error_take();

    depth--;
    gck_torch.aoti_torch_grad_mode_set_enabled(r->grad);
    if (r->buffers != NULL) {
        Py_XDECREF(PyObject_CallMethod(r->buffers, "close", NULL));
        gck_error_keep(&error);
        Py_CLEAR(r->buffers);
    }
    gck_ambient_leave(&frame->state->py, &r->surroundings);
    gck_error_keep(&error);
    gck_dynamo_restore(&frame->state->py, r->dynamo);
    return gck_error_return(&error);
}
