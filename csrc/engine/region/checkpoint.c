/* checkpoint.c: gradckpt.checkpoint: reads the arguments, records a Frame, runs the
 * function once under the hooks. */
#include "engine/region/checkpoint.h"

#include "torch/abi.h"
#include "torch/calls.h"
#include "torch/generators.h"
#include "torch/ambient.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "engine/state.h"
#include "engine/checkpoint_options.h"
#include "engine/payload/input_aliasing.h"
#include "engine/payload/packed.h"
#include "engine/region/frame.h"
#include "engine/region/recompute.h"
#include "engine/region/region.h"
#include "engine/region/region_node.h"

const char gck_checkpoint_doc[] =
    "checkpoint(function, *args, compress=None, policy=None, offload=None, use_reentrant=False, "
    "preserve_rng_state=True, context_fn=None, determinism_check='default', debug=False, early_stop=True, "
    "respect_saved_tensors_hooks=None, buffers=None, **kwargs)\n--\n\n"
    "Run ``function(*args, **kwargs)`` now, and again in backward instead of keeping what it saved.\n\n"
    "A drop-in for ``torch.utils.checkpoint.checkpoint``; gradckpt.compat lists the differences. Called\n"
    "without a function, it returns a decorator: ``@checkpoint(compress=\"int8\")``.\n\n"
    "Args:\n"
    "    function: Pure apart from random numbers and autocast, both of which the recompute repeats.\n"
    "    *args, **kwargs: Passed to ``function``. Tensors may be nested in containers.\n"
    "    compress: How the inputs of the region are kept. ``None`` keeps them by reference, as torch does.\n"
    "        ``True`` means the default codec; a codec's name, a ``CompressionConfig`` or its dict also work.\n"
    "        Compressed are floating tensors that require grad and are not leaves, of at least ``min_numel``\n"
    "        values, of any shape and strides.\n"
    "    policy: The outputs inside the region that are kept instead of computed again:\n"
    "        ``\"save_attention\"``, ``\"save_attention|save_matmuls:int8\"``, a ``gradckpt.policies.Policy``, or\n"
    "        what gradckpt.compat.create_selective_checkpoint_contexts takes. It excludes ``context_fn`` and\n"
    "        ``debug``. A second backward (``retain_graph=True``) then raises RuntimeError, as in torch.\n"
    "    offload: Where the inputs of the region that compress= means live until backward: ``None`` on their\n"
    "        device, ``\"cpu\"`` in host memory, ``\"disk\"``, or a gradckpt.Offload. Without a codec they move\n"
    "        as they are. Saved-tensor hooks around the region get them instead.\n"
    "    use_reentrant: ``True`` makes one graph node of the whole region, with torch's restrictions, and\n"
    "        excludes ``compress``, ``policy`` and ``offload``. ``None`` means ``True``, with torch's warning.\n"
    "    preserve_rng_state, context_fn, early_stop: As in torch.\n"
    "    determinism_check: ``\"default\"`` compares each tensor that the recompute saves with the forward's:\n"
    "        shape, dtype and device as in torch, and strides, argument, parameter or operator where both runs\n"
    "        know them. ``\"warn\"`` warns where it would raise, ``\"none\"`` compares nothing.\n"
    "    debug: As in torch. It also raises for parameters of the region that changed before its recompute, and\n"
    "        warns of arguments that did, by path: ``args[0].scale: 3.0, now 4.0``. Without it such changes are\n"
    "        silent, as in torch.\n"
    "    respect_saved_tensors_hooks: Whether saved-tensor hooks around the region see what a policy keeps,\n"
    "        payloads too. ``None``: they do not, and torch 2.14 and later warn; ``False``: no warning.\n"
    "    buffers: The modules whose running statistics (BatchNorm and others, see gradckpt._engine.buffers)\n"
    "        are updated once per step: a module or a list of them. ``\"once\"`` means the module that\n"
    "        ``function`` is or belongs to, ``None`` the same where one exists. With ``\"torch\"`` the recompute\n"
    "        updates them again.\n\n"
    "Returns:\n"
    "    The result of ``function``.\n\n"
    "Raises:\n"
    "    ValueError: unknown codec, policy or determinism check, keywords that exclude each other, or\n"
    "        ``buffers=\"once\"`` for a function that belongs to no module.\n"
    "    torch.utils.checkpoint.CheckpointError: in backward, when the recompute saved other tensors.\n\n"
    "Source: Chen et al. 2016, arXiv:1604.06174.";

const char gck_compat_checkpoint_doc[] =
    "checkpoint(function=None, *args, use_reentrant=None, preserve_rng_state=True, context_fn=None, "
    "determinism_check='default', debug=False, early_stop=True, respect_saved_tensors_hooks=None, **kwargs)\n--\n\n"
    "Run ``torch.utils.checkpoint.checkpoint``, with the same defaults, warnings and error texts.";

/* ---- the record ---- */

/* Make debug mode and the contexts of the two runs; *forward is NULL where none is given.  As in
 * torch the order is debug, determinism check, context_fn; policy is last. */
static int make_contexts(gck_state *state, const gck_options *o, PyObject **forward, gck_frame *frame)
{
    const int debug = gck_options_overridden(state, state->py.names._checkpoint_debug_enabled, o->debug, 0);
    const int custom = gck_options_custom_context(state, o), policy = gck_options_policy(o);
    PyObject *see_kept = o->respect_saved_tensors_hooks != NULL ? o->respect_saved_tensors_hooks : Py_None;
    PyObject *f, *r, *callback;

    *forward = NULL;
    if (debug > 0 && custom) {
        return gck_raise_torchs(&state->py, "debug_with_contexts");
    }
    if (policy && (debug > 0 || custom)) {
        return gck_done(PyErr_Format(
            PyExc_ValueError,
            custom ? "gradckpt: policy= and context_fn= exclude each other; a policy is a context_fn"
            : "gradckpt: debug=True and policy= or context_fn= exclude each other; "
            "leave one of them out"));
    }
    if (debug < 0 || gck_options_determinism(state, o->determinism_check, o->exact, &frame->check,
                                             &frame->metadata_fn) < 0) {
        return -1;
    }
    if (!debug && !custom && !policy) {
        return 0;
    }
    if (custom && !o->exact && !PyCallable_Check(o->context_fn)) {
        return gck_done(PyErr_Format(
            PyExc_TypeError, "gradckpt: context_fn is a function that returns two context managers, not %R",
            o->context_fn));
    }
    GCK_SCOPED PyObject *made =
        debug ? PyObject_CallFunction(state->py.call.debug_contexts, "OO", o->function, o->exact ? Py_True : Py_False)
        : custom ? PyObject_CallFunction(state->py.call.contexts, "(OO)", o->context_fn, see_kept)
                 : PyObject_CallFunction(state->py.call.policy_contexts, "(OO)", o->policy, see_kept);
    if (made == NULL || !PyArg_ParseTuple(made, "OOO", &f, &r, &callback)) {
        return -1;
    }
    *forward = Py_NewRef(f);
    frame->recompute_context = Py_NewRef(r);
    frame->error_callback = callback != Py_None ? Py_NewRef(callback) : NULL;
    return 0;
}

static PyMethodDef unpack_def = {"unpack", gck_unpack, METH_O, NULL};

/* Python turns a StopIteration that leaves a generator into a RuntimeError, and torch's function is
 * a generator inside. */
static void convert_stop_iteration(const gck_py *py)
{
    GCK_SCOPED PyObject *error = gck_error_object();

    Py_XDECREF(PyObject_CallFunction(py->call.raise_torchs, "sO", "stop_iteration", error));
}

static int check_accelerator(const gck_py *py, int before)
{
    const int after = gck_accelerator_initialized(py);

    if (after == 1 && before == 0) {
        return gck_raise_torchs(py, "device_began");
    }
    return after < 0 ? -1 : 0;
}

/* Take samples where the recompute will meet the error of a codec: of the arguments', else of one in which the policy
 * keeps outputs.  0 or -1. */
static int sample(gck_frame *frame, const gck_plan *plan)
{
    const gck_op_storage *store = gck_frame_store(frame);
    const gck_op_policy *policy = store != NULL && store->policy != NULL && store->policy->lossy ? store->policy : NULL;
    const gck_codec *own = frame->approximate && gck_plan_is_lossy(plan) ? plan->codec : NULL, *codec = own;

    for (int i = 0; codec == NULL && policy != NULL && i < policy->n; i++) {
        codec = gck_plan_is_lossy(&policy->named[i].plan) ? policy->named[i].plan.codec : NULL;
    }
    const int of = own == NULL ? GCK_OF_POLICY : policy != NULL ? GCK_OF_BOTH : GCK_OF_INPUTS;
    return codec == NULL ? 0 : gck_samples_begin(&frame->samples, frame->function, codec, of);
}

/* Run the call with grad on. */
static PyObject *record(gck_state *state, gck_frame *frame, const gck_options *o, const gck_plan *plan,
                        PyObject *context, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs)
{
    GCK_CLEARED_BY(gck_packing_end) gck_packing packing = {.state = state, .plan = *plan};
    const gck_hooks hooks = {(PyObject *)frame, &unpack_def, &frame->nslots, &frame->run};
    const int preserve = gck_truth(o->preserve_rng_state, 1);
    GCK_SCOPED PyObject *fed_args = NULL, *fed_kwargs = NULL, *result = NULL;
    int initialized = 0;

    frame->function = Py_NewRef(o->function);
    frame->once = Py_XNewRef(o->once);
    frame->early_stop = gck_options_overridden(state, state->py.names._enable_checkpoint_early_stop, o->early_stop, 1);
    if (preserve >= 0 && frame->early_stop >= 0
        && gck_region_keep(frame, &packing, args, nargs, kwargs, preserve, o->exact, &fed_args, &fed_kwargs) == 0
        && sample(frame, &packing.plan) == 0
        && (initialized = preserve ? gck_accelerator_initialized(&state->py) : 1) >= 0) {
        result = gck_region_call(frame, &hooks, context, fed_args, fed_kwargs, 0);
    }
    if (result == NULL || (preserve && check_accelerator(&state->py, initialized) < 0)
        || gck_input_aliasing_check(packing.aliases, &state->py) < 0
        || gck_samples_returned(&frame->samples, (PyObject *)frame, result, GCK_NODES - state->nodes_known) < 0
        || (frame->calls != NULL
            && gck_done(PyObject_CallFunction(state->py.call.finish_calls, "Oni", frame->calls, frame->nslots,
                                              frame->early_stop)) < 0)) {
        return NULL;
    }
    frame->phase = GCK_SAVED_PHASE;
    return gck_give(&result);
}

/* With grad off torch too only calls the function, outside the contexts. */
static PyObject *call_plain(const gck_options *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs)
{
    GCK_SCOPED PyObject *tuple = gck_tuple(args, nargs);
    return tuple != NULL ? PyObject_Call(o->function, tuple, kwargs) : NULL;
}

static PyObject *call_non_reentrant(gck_state *state, const gck_options *o, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwargs)
{
    GCK_SCOPED PyObject *context = NULL, *place = NULL;
    PyObject *result = NULL;
    gck_plan plan;

    if (gck_options_plan(state, o->compress, &plan) < 0 || gck_options_place(state, o->offload, &plan, &place) < 0) {
        return NULL;
    }
    GCK_SCOPED gck_frame *frame = gck_frame_new(state);
    if (frame != NULL && make_contexts(state, o, &context, frame) == 0) {
        result = gck_torch.aoti_torch_grad_mode_is_enabled()
            ? record(state, frame, o, &plan, context, args, nargs, kwargs)
            : call_plain(o, args, nargs, kwargs);
        if (result == NULL && PyErr_ExceptionMatches(PyExc_StopIteration)) {
            convert_stop_iteration(&state->py);
        }
    }
    return result;
}

/* use_reentrant= as truth.  None warns and means True, as in torch. */
static int is_reentrant(const gck_state *state, const gck_options *o)
{
    if (o->use_reentrant == Py_None || (o->use_reentrant == NULL && o->exact)) {
        return gck_done(PyObject_CallFunction(state->py.call.warn_torchs, "s", "not_explicit")) < 0 ? -1 : 1;
    }
    return gck_truth(o->use_reentrant, 0);
}

/* Run either form, its forward uncompiled. */
static PyObject *run_region(gck_state *state, const gck_options *o, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwargs)
{
    const int reentrant = is_reentrant(state, o);
    PyObject *dynamo, *result;

    if (reentrant < 0 || gck_dynamo_off(&state->py, &dynamo) < 0) {
        return NULL;
    }
    result = reentrant ? gck_reentrant_call(state, o, args, nargs, kwargs)
                       : call_non_reentrant(state, o, args, nargs, kwargs);
    gck_dynamo_restore(&state->py, dynamo);
    return result;
}

/* The function rejected a keyword that was perhaps meant for us: its error gets a note. */
static void note_keyword(const gck_state *state, PyObject *kwargs)
{
    GCK_CLEARED_BY(gck_error_return) gck_error error = gck_error_take();

    PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
    (void)gck_done(PyObject_CallFunction(state->py.call.note_keyword, "OO", error.value, kwargs));
}

/* checkpoint(...) without a function: what makes one region of each call of the function that it gets. */
static PyObject *decorator(PyObject *module, PyObject *const *values, PyObject *kwnames, PyObject *unknown, int exact)
{
    PyObject *names = kwnames != NULL ? Py_NewRef(kwnames) : PyTuple_New(0);

    if (names == NULL) {
        return NULL;
    }
    return gck_invoke(gck_state_of(module)->py.call.decorate,
                      Py_BuildValue("(ONNOi)", module, names, gck_tuple(values, PyTuple_Size(names)),
                                    unknown != NULL ? unknown : Py_None, exact));
}

static PyObject *call(PyObject *module, PyObject *const *all, Py_ssize_t nall, PyObject *kwnames, int exact)
{
    gck_state *state = gck_state_of(module);
    GCK_SCOPED PyObject *kwargs = NULL;
    gck_options o;

    if (gck_options_parse(state, all, nall, kwnames, exact, &o, &kwargs) < 0) {
        return NULL;
    }
    if (o.function == NULL || (o.function == Py_None && nall <= 1)) {
        return decorator(module, all + nall, kwnames, kwargs, exact);
    }
    PyObject *result = run_region(state, &o, nall > 0 ? all + 1 : all, nall > 0 ? nall - 1 : 0, kwargs);
    if (result == NULL && kwargs != NULL && !exact && PyErr_ExceptionMatches(PyExc_TypeError)) {
        note_keyword(state, kwargs);
    }
    return result;
}

PyObject *gck_checkpoint(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return call(module, args, nargs, kwnames, 0);
}

PyObject *gck_compat_checkpoint(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return call(module, args, nargs, kwnames, 1);
}
