/* region.c: keeps the arguments of a region, restores them, runs its function. */
#include "engine/region/region.h"

#include "torch/ambient.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "torch/tensor.h"
#include "engine/checkpoint_options.h"
#include "engine/rounding.h"
#include "engine/payload/batch.h"
#include "engine/payload/input_aliasing.h"
#include "engine/payload/restored.h"
#include "engine/payload/stats.h"
#include "engine/selective/op_catching.h"
#include "engine/selective/op_hiding.h"
#include "engine/selective/op_storage.h"
#include "engine/selective/replay_discrete.h"
#include "engine/selective/selective_mode.h"
#include "engine/saved/saved_hooks.h"

#include <stdlib.h>

/* ---- forward ---- */

/* 1 when other saved-tensor hooks are active: payloads then go through them.  They may keep tensors
 * lossily, inputs of ours among them. */
static int outer_hooks(gck_frame *frame)
{
    const gck_py *py = &frame->state->py;
    GCK_SCOPED PyObject *top = PyObject_CallFunctionObjArgs(py->top_hooks, Py_True, NULL);
    const int active = top == NULL ? -1 : top != Py_None;

    frame->approximate = active > 0 && gck_saved_hooks_are_lossy(top, &frame->replay_discrete);
    return active;
}

/* Count the region.  Nothing is compressed under tracing.  0 or -1. */
static int begin(gck_frame *frame, gck_packing *packing)
{
    gck_state *state = frame->state;
    gck_op_storage *store = gck_frame_store(frame);
    const int tracing = packing->plan.codec == NULL ? 0 : gck_tracing(&state->py);

    packing->outer = tracing < 0 ? -1 : outer_hooks(frame);
    if (packing->outer < 0) {
        return -1;
    }
    if (store != NULL) {
        store->alone = packing->outer ? NULL : (PyObject *)frame;
    }
    state->stats.regions++;
    frame->unmet_in = state->epoch + 1;
    state->stats.regions_eligible += packing->plan.codec != NULL;
    if (tracing) {
        packing->plan.codec = NULL;
        state->stats.uncompressed[GCK_SKIP_TRACING]++;
    }
    return 0;
}

/* Make entries for all arguments, and what the forward gets.  0 or -1. */
static int pack_arguments(gck_frame *frame, gck_packing *packing, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwargs, PyObject **fed_args, PyObject **fed_kwargs)
{
    const Py_ssize_t nkw = kwargs != NULL ? PyDict_Size(kwargs) : 0;
    PyObject *names = kwargs != NULL ? PySequence_Tuple(kwargs) : NULL;
    /* a tuple later: packing runs Python, to which gc shows it */
    GCK_SCOPED PyObject *fed = PyList_New(0);

    *fed_kwargs = kwargs != NULL ? PyDict_New() : NULL;
    frame->kwnames = names;
    frame->args = calloc((size_t)(nargs + nkw) + 1, sizeof(gck_packed));
    if (frame->args == NULL) {
        PyErr_NoMemory();
    }
    if (fed == NULL || (kwargs != NULL && (names == NULL || *fed_kwargs == NULL)) || frame->args == NULL) {
        return -1;
    }
    frame->nargs = nargs;
    frame->nkwargs = nkw;                        /* entries that are not yet packed are empty */
    for (Py_ssize_t i = 0; i < nargs + nkw; i++) {
        PyObject *name = i < nargs ? NULL : PyTuple_GetItem(names, i - nargs);
        PyObject *x = name == NULL ? args[i] : PyDict_GetItemWithError(kwargs, name);
        GCK_SCOPED PyObject *value = NULL;
        if (x == NULL || gck_pack(packing, x, name == NULL, &frame->args[i], &value) < 0
            || (name == NULL ? PyList_Append(fed, value) : PyDict_SetItem(*fed_kwargs, name, value)) < 0) {
            return -1;
        }
    }
    *fed_args = PyList_AsTuple(fed);
    return *fed_args == NULL ? -1 : 0;
}

/* Call the observer, which reads by gc.get_referents() what the frame keeps.  0 or -1. */
static int show(gck_frame *frame)
{
    GCK_SCOPED PyObject *observer = Py_XNewRef(frame->state->observer);
    return observer == NULL ? 0 : gck_done(PyObject_CallFunctionObjArgs(observer, (PyObject *)frame, NULL));
}

int gck_region_keep(gck_frame *frame, gck_packing *packing, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs,
                    int preserve_rng, int exact, PyObject **fed_args, PyObject **fed_kwargs)
{
    gck_state *state = frame->state;
    gck_batch batch;
    int status;

    *fed_args = *fed_kwargs = NULL;
    if (begin(frame, packing) < 0) {
        return -1;
    }
    gck_batch_begin(&batch, state, 0);
    packing->batch = &batch;
    status = pack_arguments(frame, packing, args, nargs, kwargs, fed_args, fed_kwargs);
    if (status == 0) {
        status = gck_pack_slices(packing, frame->args, frame->nargs + frame->nkwargs);
    }
    packing->batch = NULL;
    if (status < 0) {
        gck_batch_drop(&batch);
        return -1;
    }
    if (gck_batch_flush(&batch) < 0) {
        return -1;
    }
    state->stats.regions_compressed += packing->payloads > 0;
    frame->approximate |= packing->payloads > 0 && gck_plan_is_lossy(&packing->plan);
    frame->fake_quantized = packing->plan.fake_quantize;
    if (packing->payloads > 0 && packing->plan.replay_discrete > frame->replay_discrete) {
        frame->replay_discrete = packing->plan.replay_discrete;
    }
    gck_op_storage *store = gck_frame_store(frame);      /* that of its contexts, where these are ours */
    if (gck_region_replays_discrete(state, frame->replay_discrete, frame->approximate,
                                    store != NULL ? &store : &frame->store) < 0) {
        return -1;
    }
    if (packing->payloads == 0 || (PyList_Size(packing->aliases) == 1 && !packing->plan.fake_quantize)) {
        Py_CLEAR(packing->aliases);    /* the function may free what it takes out of a list */
    }
    if (gck_ambient_capture(&state->py, &frame->ambient, preserve_rng, exact, *fed_args, *fed_kwargs) < 0
        || gck_count_random(state, frame->ambient.cpu_rng, &frame->random_bytes) < 0) {
        return -1;
    }
    return packing->outer ? 0 : show(frame);     /* outer hooks decide whether the bytes stay */
}

/* ---- backward ---- */

static int restore_entries(gck_frame *frame, gck_batch *batch, PyObject *inputs, PyObject *args, PyObject *kwargs)
{
    for (Py_ssize_t i = 0; i < frame->nargs + frame->nkwargs; i++) {
        GCK_SCOPED PyObject *value = gck_packed_restore(frame->state, &frame->args[i], batch, inputs);
        if (value == NULL
            || (i < frame->nargs ? PyList_Append(args, value)
                : PyDict_SetItem(kwargs, PyTuple_GetItem(frame->kwnames, i - frame->nargs), value)) < 0) {
            gck_batch_drop(batch);
            return -1;
        }
    }
    return gck_batch_flush(batch);
}

/* A list first: restoring runs Python, and code that finds a half-made tuple through gc makes it
 * immutable. */
int gck_region_restore(gck_frame *frame, PyObject *saved, PyObject *inputs, PyObject **args, PyObject **kwargs)
{
    GCK_SCOPED PyObject *list = PyList_New(0);
    gck_batch batch;

    gck_batch_begin(&batch, frame->state, 1);
    batch.saved = saved;
    batch.exact = frame->exact && !frame->fake_quantized;
    *args = NULL;
    *kwargs = frame->nkwargs ? PyDict_New() : NULL;
    if (list != NULL && (*kwargs != NULL || !frame->nkwargs)
        && restore_entries(frame, &batch, inputs, list, *kwargs) == 0) {
        *args = PyList_AsTuple(list);
    }
    Py_XDECREF(batch.made);
    if (*args == NULL) {
        Py_CLEAR(*kwargs);
        return -1;
    }
    frame->state->stats.recomputes++;
    frame->state->stats.regions_met += gck_frame_is_unmet(frame);
    frame->unmet_in = 0;
    frame->state->rounding.restored = 1;
    return 0;
}

int gck_region_note_create_graph(const gck_frame *frame)
{
    return !frame->approximate || frame->exact || !gck_torch.aoti_torch_grad_mode_is_enabled() ? 0
         : gck_done(PyObject_CallFunction(frame->state->py.call.note_create_graph, NULL));
}

int gck_region_note_step(gck_state *state)
{
    if (state->last_step == state->rounding.step) {
        return 0;
    }
    state->last_step = state->rounding.step;
    state->stats.steps++;
    return gck_done(PyObject_CallFunction(state->py.call.note_step, "L", (long long)state->stats.regions_eligible));
}

/* ---- the function ---- */

/* 0 with an exception when the look-up failed. */
static int remat_is_imported(const gck_py *py)
{
    return PyDict_GetItemWithError(PyImport_GetModuleDict(), py->names.torch_remat) != NULL;
}

/* Warn when the region's function has imported torch_remat.  0 or -1. */
static int remat_is_late(const gck_py *py)
{
    if (!remat_is_imported(py)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return gck_done(PyObject_CallFunction(py->call.remat_imported, NULL));
}

/* Reset the first n of the context variables that were set, the last one first; a pending exception
 * survives. */
static int remat_reset(PyObject *variables, PyObject *tokens, Py_ssize_t n)
{
    gck_error error = gck_error_take();

    while (n-- > 0) {
        gck_done(PyObject_CallFunctionObjArgs(PyTuple_GetItem(PyTuple_GetItem(variables, n), 2),
                                              PyList_GetItem(tokens, n), NULL));
        gck_error_keep(&error);
    }
    return gck_error_return(&error);
}

/* Where torch_remat is imported, enter the state that its regions look for: context variables, as
 * (set, value, reset).  They are set and reset in C, so that no signal handler runs in between.
 * *tokens: new reference, NULL: nothing was entered, and what *variables has is let go all the same.  0 or -1. */
static int remat_enter(gck_frame *frame, const gck_hooks *hooks, int replay, PyObject **variables, PyObject **tokens)
{
    const gck_py *py = &frame->state->py;

    if (frame->remat == NULL && !replay) {
        if (!remat_is_imported(py)) {
            return PyErr_Occurred() ? -1 : 0;
        }
        frame->remat = PyObject_CallFunction(py->call.remat_region, "iii", hooks == NULL,
                                             frame->ambient.cpu_rng != NULL, gck_is_approximate(frame));
    }
    if (frame->remat == NULL || frame->remat == Py_None) {
        return PyErr_Occurred() ? -1 : 0;
    }
    *variables = PyObject_CallFunction(py->call.remat_enter, "Oi", frame->remat, replay);
    *tokens = *variables != NULL ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; *tokens != NULL && i < PyTuple_Size(*variables); i++) {
        PyObject *row = PyTuple_GetItem(*variables, i);
        if (gck_append(*tokens, PyObject_CallFunctionObjArgs(PyTuple_GetItem(row, 0), PyTuple_GetItem(row, 1), NULL))
            < 0) {
            remat_reset(*variables, *tokens, i);
            Py_CLEAR(*tokens);
        }
    }
    return *tokens != NULL ? 0 : -1;
}

/* result: NULL with an exception, which survives.  0 or -1. */
static int remat_leave(const gck_frame *frame, int replay, PyObject *variables, PyObject *tokens, PyObject *result)
{
    gck_error error = gck_error_take();

    if (result != NULL || !replay) {             /* a recompute that stopped early left nothing */
        gck_done(PyObject_CallFunction(frame->state->py.call.remat_leave, "OiiO", frame->remat, replay, result == NULL,
                                       result != NULL ? result : Py_None));
    }
    gck_error_return(&error);
    return remat_reset(variables, tokens, PyTuple_Size(variables));
}

/* Push, call and pop happen in one C function, so that no signal handler runs in between. */
static PyObject *call_hooked(gck_frame *frame, const gck_hooks *hooks, PyObject *context, PyObject *args,
                             PyObject *kwargs, int replay)
{
    const gck_py *py = &frame->state->py;
    GCK_SCOPED PyObject *variables = NULL, *tokens = NULL;
    PyObject *result = NULL;

    if (hooks != NULL && gck_hooks_push(py, Py_NewRef(hooks->pack), hooks->unpack, hooks->pack) < 0) {
        return NULL;
    }
    if (remat_enter(frame, hooks, replay, &variables, &tokens) == 0) {
        result = context == NULL ? PyObject_Call(frame->function, args, kwargs)
               : PyObject_CallFunction(replay ? py->call.recompute_within : py->call.call_within, "OOOOOO", context,
                                       frame->function, args, kwargs != NULL ? kwargs : Py_None,
                                       frame->ambient.device ? frame->ambient.device : Py_None, (PyObject *)frame);
    }
    if (tokens != NULL && remat_leave(frame, replay, variables, tokens, result) < 0) {
        Py_CLEAR(result);
    } else if (result != NULL && !replay && frame->remat == NULL && remat_is_late(py) < 0) {
        Py_CLEAR(result);
    }
    if (hooks != NULL) {
        gck_hooks_pop(py);
    }
    return result;
}

PyObject *gck_region_call(gck_frame *frame, const gck_hooks *hooks, PyObject *context, PyObject *args,
                          PyObject *kwargs, int replay)
{
    /* With the forward's own arguments every operator returns what it returned: nothing is replayed. */
    const int alike = replay && frame->exact, ours = alike && gck_context_store(frame->state, context) != NULL;
    gck_rounding rounding = frame->rounding, *around;
    gck_op_catching caught;
    gck_running here;
    gck_run run;
    PyObject *result;

    context = ours ? NULL : context;
    if (gck_run_of(&frame->state->py, &run, hooks != NULL ? hooks->saved : NULL, args, kwargs) < 0) {
        return NULL;
    }
    if (!replay && gck_frame_remember(frame, &run) < 0) {
        return NULL;
    }
    run.originals = replay ? frame->originals : NULL;
    run.laid_anew = run.layouts != frame->layouts;
    if (gck_running_enter(&here, frame, hooks, replay) < 0) {
        return NULL;
    }
    gck_hide_from_active(frame->state, replay);    /* a region around saw these operators in the forward */
    if (gck_op_catching_begin(frame->state, &caught, alike ? NULL : frame->store, frame->node.policy_fn, replay,
                              &run) < 0) {
        gck_hide_from_active(frame->state, -replay);
        gck_running_leave(&here);
        return NULL;
    }
    const gck_context_run before = gck_context_run_swap((gck_context_run){context, &run});
    if (hooks != NULL) {
        *hooks->run = &run;
    }
    around = gck_rounding_swap(&rounding);
    result = call_hooked(frame, hooks, context, args, kwargs, replay);
    gck_rounding_swap(around);
    if (hooks != NULL) {
        *hooks->run = NULL;
    }
    gck_context_run_swap(before);
    gck_context_run_forget(frame->state, &run);
    if (gck_op_catching_end(frame->state, &caught) < 0) {
        Py_CLEAR(result);
    }
    gck_hide_from_active(frame->state, -replay);
    gck_running_leave(&here);
    return result;
}
