/* rerun.c: enters and leaves the state in which a region runs again. */
#include "rerun.h"

#include "../torch/dynamo.h"
#include "parameters.h"

/* Recomputes under way on this thread.  A fact about a thread, which no object has. */
static _Thread_local int depth;

PyObject *gck_is_recomputing(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(depth > 0);
}

PyObject *gck_forget_modules(PyObject *module, PyObject *unused)
{
    (void)unused;
    PyDict_Clear(gck_state_of(module)->stateless);
    PyDict_Clear(gck_state_of(module)->closed);
    Py_RETURN_NONE;
}

/* ---- running statistics ---- */

/* New reference: list of the arguments that are no tensors; an ellipsis for each container with tensors. */
static PyObject *others(const gck_frame *frame)
{
    PyObject *list = PyList_New(0);

    for (Py_ssize_t i = 0; list != NULL && i < frame->nargs + frame->nkwargs; i++) {
        const gck_entry *entry = &frame->args[i];
        PyObject *other = entry->kind == GCK_TREE ? Py_Ellipsis : entry->kind == GCK_KEPT ? entry->value : NULL;
        if (other != NULL && PyList_Append(list, other) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Reaches no running statistics: a value of a plain type, or a module that was looked at. */
static int harmless(const gck_state *state, PyObject *x)
{
    return gck_known(state->stateless, (PyObject *)Py_TYPE(x)) || gck_known(state->stateless, x);
}

/* The same of all items; items NULL or None: there are none.  Takes them over. */
static int all_harmless(const gck_state *state, PyObject *items, PyObject *globals, const char *attribute)
{
    const Py_ssize_t n = items != NULL && items != Py_None ? PyTuple_Size(items) : 0;
    int good = items != NULL;

    for (Py_ssize_t i = 0; good && i < n; i++) {
        PyObject *item = PyTuple_GetItem(items, i), *x = item;
        if (globals != NULL) {
            x = Py_XNewRef(PyDict_GetItemWithError(globals, item));
        } else {
            x = attribute != NULL ? PyObject_GetAttrString(item, attribute) : Py_NewRef(item);
        }
        good = x != NULL ? harmless(state, x) : globals != NULL && !PyErr_Occurred();     /* else a cell that is empty */
        Py_XDECREF(x);
    }
    Py_XDECREF(items);
    return good;
}

/* A plain function whose code gradckpt.buffers has read: nothing that it reaches now has running statistics. */
static int function_harmless(const gck_frame *frame)
{
    const gck_state *state = frame->state;
    PyObject *f = frame->function;
    PyObject *code = Py_TYPE(f) == Py_TYPE(state->py.noop_context_fn) ? PyObject_GetAttrString(f, "__code__") : NULL;
    PyObject *keywords = code != NULL ? PyObject_GetAttrString(f, "__kwdefaults__") : NULL;
    int good = keywords == Py_None && gck_known(state->stateless, code);

    Py_XDECREF(keywords);
    for (Py_ssize_t i = 0; good && i < frame->nargs + frame->nkwargs; i++) {
        const gck_entry *entry = &frame->args[i];
        good = entry->kind != GCK_TREE && (entry->kind != GCK_KEPT || harmless(state, entry->value));
    }
    if (good) {
        PyObject *globals = PyObject_GetAttrString(f, "__globals__");
        good = globals != NULL && all_harmless(state, PyObject_GetAttrString(code, "co_names"), globals, NULL)
            && all_harmless(state, PyObject_GetAttrString(f, "__closure__"), NULL, "cell_contents")
            && all_harmless(state, PyObject_GetAttrString(f, "__defaults__"), NULL, NULL);
        Py_XDECREF(globals);
    }
    Py_XDECREF(code);
    if (PyErr_ExceptionMatches(PyExc_ValueError)) {          /* of an empty cell */
        PyErr_Clear();
    }
    gck_error_report();
    return good;
}

static int enter_buffers(gck_frame *frame, gck_rerun *r)
{
    gck_state *state = frame->state;

    if (!frame->buffers_once || gck_known(state->stateless, frame->function) || function_harmless(frame)) {
        return 0;
    }
    r->buffers = gck_method(state->py.shim, "buffers_enter", Py_BuildValue("(ON)", frame->function, others(frame)));
    if (r->buffers == Py_None) {
        Py_CLEAR(r->buffers);
        return 0;
    }
    return r->buffers == NULL ? -1 : 0;
}

PyObject *gck_remember_stateless(PyObject *module, PyObject *objects)
{
    for (Py_ssize_t i = 0; i < PyList_Size(objects); i++) {
        gck_remember(gck_state_of(module)->stateless, PyList_GetItem(objects, i));
    }
    Py_RETURN_NONE;
}

/* ---- begin, end ---- */

static int begin(gck_frame *frame, gck_rerun *r)
{
    gck_py *py = &frame->state->py;

    r->buffers = NULL;
    if (frame->parameters != NULL
        && gck_done(PyObject_CallMethod(py->shim, "check_parameters", "O", frame->parameters)) < 0) {
        return -1;
    }
    if (gck_ambient_enter(py, &frame->ambient, frame->recompute_context == NULL, &r->surroundings) < 0) {
        return -1;
    }
    if (enter_buffers(frame, r) < 0) {
        gck_ambient_leave(py, &r->surroundings);
        return -1;
    }
    r->grad = gck_torch.aoti_torch_grad_mode_is_enabled();
    gck_torch.aoti_torch_grad_mode_set_enabled(true);
    depth++;
    return 0;
}

int gck_rerun_begin(gck_frame *frame, gck_rerun *r)
{
    const gck_py *py = &frame->state->py;

    if (gck_dynamo_off(py, &r->dynamo) < 0) {
        return -1;
    }
    if (begin(frame, r) < 0) {
        gck_dynamo_restore(py, r->dynamo);
        return -1;
    }
    return 0;
}

int gck_rerun_end(gck_frame *frame, gck_rerun *r)
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
