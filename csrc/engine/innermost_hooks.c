/* innermost_hooks.c: whose saved-tensor hooks are on top of torch's stack. */
#include "engine/innermost_hooks.h"

#include "torch/calls.h"
#include "torch/error.h"

/* 1 when torch's checkpoint has defined the hook; 0; -1. */
static int is_of_torchs_checkpoint(const gck_py *py, PyObject *hook)
{
    GCK_SCOPED PyObject *module = PyObject_GetAttr(hook, py->names.__module__);
    const int theirs = module != NULL && PyUnicode_Check(module)
                    && PyUnicode_CompareWithASCIIString(module, "torch.utils.checkpoint") == 0;

    return module == NULL ? gck_clear_attribute_error() : theirs;
}

PyObject *gck_innermost_hooks(const gck_state *state, gck_hooks_owner *owner, PyObject **self)
{
    PyObject *top = PyObject_CallFunctionObjArgs(state->py.top_hooks, Py_True, NULL);
    PyObject *hook = top != NULL && PyTuple_Check(top) && PyTuple_Size(top) == 2 ? PyTuple_GetItem(top, 0) : NULL;
    int torchs;

    *owner = hook != NULL ? GCK_HOOKS_OTHER : GCK_HOOKS_NONE;
    *self = hook;
    if (hook != NULL && (Py_TYPE(hook) == state->Frame || Py_TYPE(hook) == state->Recompute)) {
        *owner = GCK_HOOKS_REGION;
        return top;
    }
    *self = NULL;
    torchs = hook != NULL ? is_of_torchs_checkpoint(&state->py, hook) : 0;
    if (torchs < 0) {
        Py_CLEAR(top);
    } else if (torchs) {
        *owner = GCK_HOOKS_TORCHS_REGION;
    }
    return top;
}

PyObject *gck_hooks_beneath(const gck_state *state, const PyObject *of, gck_hooks_owner *owner)
{
    PyObject *self;
    GCK_SCOPED PyObject *top = gck_innermost_hooks(state, owner, &self), *disabled = NULL, *below = NULL;
    const int above = of != NULL ? self == of : *owner == GCK_HOOKS_REGION || *owner == GCK_HOOKS_TORCHS_REGION;

    if (top == NULL || !above) {
        return gck_give(&top);
    }
    if ((disabled = PyObject_CallNoArgs(state->py.hooks_disabled)) != NULL && disabled != Py_None) {
        *owner = GCK_HOOKS_NONE;                 /* none could be pushed again, and none sees anything */
        return Py_NewRef(Py_None);
    }
    if (disabled == NULL || gck_done(PyObject_CallNoArgs(state->py.pop_hooks)) < 0) {
        return NULL;
    }
    below = gck_hooks_beneath(state, of, owner);
    gck_error error = gck_error_take();
    Py_XDECREF(PyObject_Call(state->py.push_hooks, top, NULL));
    return gck_error_return(&error) < 0 ? NULL : gck_give(&below);
}

/* 1 when torch's checkpoint, too, sees hooks here: not in a graph that is traced; 0; -1. */
static int torch_sees_hooks(const gck_py *py)
{
    GCK_SCOPED PyObject *top = PyObject_CallFunctionObjArgs(py->top_hooks, Py_False, NULL);
    const int traced = top == NULL ? -1 : top == Py_None ? 1 : gck_ask(py->is_tracing_checkpoint);

    return traced < 0 ? -1 : !traced;
}

PyObject *gck_hooks_that_see(const gck_state *state, const PyObject *alone, int shown)
{
    const gck_py *py = &state->py;
    gck_hooks_owner owner;
    PyObject *self;
    GCK_SCOPED PyObject *hooks = NULL, *top = shown != 0 ? gck_innermost_hooks(state, &owner, &self)
                                                         : Py_NewRef(Py_None);
    int seen;

    if (top == NULL || top == Py_None) {
        return gck_give(&top);
    }
    hooks = self != NULL && self == alone ? Py_NewRef(Py_None) : gck_hooks_beneath(state, NULL, &owner);
    if (hooks == NULL || hooks == Py_None || ((seen = torch_sees_hooks(py)) > 0 && shown > 0)) {
        return gck_give(&hooks);
    }
    return seen < 0 || (seen > 0 && gck_done(PyObject_CallFunction(py->call.warn_torchs, "s", "hooks_bypassed")) < 0)
         ? NULL : Py_NewRef(Py_None);
}

static PyObject *user_hooks(PyObject *hook, void *Py_UNUSED(unused))
{
    const gck_state *state = PyType_GetModuleState(Py_TYPE(hook));
    gck_hooks_owner owner;
    PyObject *self = NULL;
    GCK_SCOPED PyObject *top = gck_innermost_hooks(state, &owner, &self);

    return top == NULL ? NULL : self == hook ? gck_hooks_beneath(state, NULL, &owner) : Py_NewRef(Py_None);
}

static PyObject *is_internal(PyObject *Py_UNUSED(hook), void *Py_UNUSED(unused)) { return Py_NewRef(Py_True); }

PyGetSetDef gck_hook_getset[] = {
    {"_checkpoint_internal", is_internal, NULL, NULL, NULL},
    {"_user_hooks", user_hooks, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
