/* innermost_hooks.c: whose saved-tensor hooks are on top of torch's stack. */
#include "engine/innermost_hooks.h"

#include "torch/error.h"

/* 1 when torch's checkpoint has defined the hook; 0; -1. */
static int is_of_torchs_checkpoint(const gck_py *py, PyObject *hook)
{
    PyObject *module = PyObject_GetAttr(hook, py->names.__module__);
    const int theirs = module != NULL && PyUnicode_Check(module)
                    && PyUnicode_CompareWithASCIIString(module, "torch.utils.checkpoint") == 0;

    Py_XDECREF(module);
    return module == NULL ? gck_clear_attribute_error() : theirs;
}

PyObject *gck_innermost_hooks(const gck_state *state, gck_hooks_owner *owner, PyObject **self)
{
    PyObject *top = PyObject_CallFunctionObjArgs(state->py.top_hooks, Py_True, NULL);
    PyObject *hook = top != NULL && PyTuple_Check(top) && PyTuple_Size(top) == 2 ? PyTuple_GetItem(top, 0) : NULL;
    int torchs;

    *owner = hook != NULL ? GCK_HOOKS_OTHER : GCK_HOOKS_NONE;
    *self = hook != NULL && PyCFunction_CheckExact(hook) ? PyCFunction_GetSelf(hook) : NULL;
    if (*self != NULL && (Py_TYPE(*self) == state->Frame || Py_TYPE(*self) == state->Recompute)) {
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
