/* checkpoint.c: gradckpt.checkpoint: reads the arguments, records a Frame, runs the
 * function once under the hooks. */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

const char gck_checkpoint_doc[] =
    "checkpoint(function, /, *args, compress=None, use_reentrant=False, preserve_rng_state=True, context_fn=None, "
    "determinism_check='default', debug=False, early_stop=True, **kwargs)\n--\n\n"
    "Run ``function(*args, **kwargs)`` now; run it again in backward instead of keeping what it saved.\n\n"
    "A drop-in for ``torch.utils.checkpoint.checkpoint`` (non-reentrant) with one more keyword.\n\n"
    "Args:\n"
    "    function: Pure apart from random numbers and autocast, both replayed.\n"
    "    *args, **kwargs: Passed to ``function``; tensors may be nested in containers.\n"
    "    compress: How the inputs of the region are kept. ``None``: by reference, as torch does; ``True``: the\n"
    "        default codec; a codec's name; a ``CompressionConfig`` or its dict. Compressed are floating tensors\n"
    "        that require grad and are not leaves, of at least ``min_numel`` values, of any shape and strides.\n"
    "    use_reentrant: ``True`` or ``None`` go to torch's own implementation; not with ``compress``.\n"
    "    preserve_rng_state, context_fn, determinism_check, debug, early_stop: as in torch.\n\n"
    "Returns:\n"
    "    What ``function`` returned.\n\n"
    "Raises:\n"
    "    ValueError: unknown codec or determinism check, or keywords that exclude each other.\n"
    "    torch.utils.checkpoint.CheckpointError: in backward, when the recompute saved other tensors.\n\n"
    "Source: Chen et al. 2016, arXiv:1604.06174.";

/* The keywords of checkpoint() itself: borrowed from the caller; NULL when not given. */
typedef struct {
    PyObject *function, *compress, *use_reentrant, *preserve_rng_state, *context_fn, *determinism_check, *debug,
        *early_stop;
} options;

static PyObject **option_slot(options *o, PyObject *name)
{
    static const struct { const char *name; size_t offset; } known[] = {
        {"compress", offsetof(options, compress)},
        {"use_reentrant", offsetof(options, use_reentrant)},
        {"preserve_rng_state", offsetof(options, preserve_rng_state)},
        {"context_fn", offsetof(options, context_fn)},
        {"determinism_check", offsetof(options, determinism_check)},
        {"debug", offsetof(options, debug)},
        {"early_stop", offsetof(options, early_stop)},
        {"function", offsetof(options, function)},
    };

    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (PyUnicode_CompareWithASCIIString(name, known[i].name) == 0) {
            return (PyObject **)((char *)o + known[i].offset);
        }
    }
    return NULL;
}

/* Ours go to *o, the rest to *kwargs (new reference, or NULL when there are none). */
static int parse(PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, options *o, PyObject **kwargs)
{
    const Py_ssize_t nkw = kwnames != NULL ? PyTuple_Size(kwnames) : 0;

    memset(o, 0, sizeof *o);
    *kwargs = NULL;
    if (nargs > 0) {
        o->function = args[0];
    }
    for (Py_ssize_t i = 0; i < nkw; i++) {
        PyObject *name = PyTuple_GetItem(kwnames, i), *value = args[nargs + i];
        PyObject **slot = option_slot(o, name);
        if (slot == &o->function && nargs > 0) {
            slot = NULL;                         /* the region's own keyword */
        }
        if (slot != NULL) {
            *slot = value;
        } else if ((*kwargs == NULL && (*kwargs = PyDict_New()) == NULL) || PyDict_SetItem(*kwargs, name, value) < 0) {
            Py_CLEAR(*kwargs);
            return -1;
        }
    }
    if (o->function == NULL) {
        Py_CLEAR(*kwargs);
        PyErr_SetString(PyExc_TypeError, "checkpoint() missing 1 required positional argument: 'function'");
        return -1;
    }
    return 0;
}

static int truth_of(PyObject *value, int missing)
{
    return value == NULL ? missing : value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
}

/* A module-level override of torch (None: not set) beats the argument. */
static int overridden(gck_state *state, const char *name, PyObject *argument, int missing)
{
    PyObject *global = PyObject_GetAttrString(state->py.checkpoint_module, name);
    int truth;

    if (global == NULL) {
        PyErr_Clear();                           /* an older torch */
        return truth_of(argument, missing);
    }
    truth = global == Py_None ? truth_of(argument, missing) : PyObject_IsTrue(global);
    Py_DECREF(global);
    return truth;
}

/* ---- compress= ---- */

static int parse_plan(gck_state *state, PyObject *compress, gck_plan *plan)
{
    PyObject *parsed = PyObject_CallMethod(state->py.shim, "parse_plan", "(O)", compress);   /* a tuple stays one */
    const char *codec = NULL;
    long long min_numel = 0;
    int ok;

    *plan = (gck_plan){NULL, 0, 0, 0, 0};
    if (parsed == NULL) {
        return -1;
    }
    if (parsed == Py_None) {
        Py_DECREF(parsed);
        return 0;
    }
    ok = PyArg_ParseTuple(parsed, "sLppp", &codec, &min_numel, &plan->replay, &plan->floating, &plan->leaves);
    if (ok) {
        plan->min_numel = min_numel;
        plan->codec = gck_codec_find(codec);
    }
    Py_DECREF(parsed);
    return ok ? 0 : -1;
}

/* Names and CompressionConfigs are immutable, and the same few objects come again and
 * again: the latest are remembered by identity.  A mapping may change: read every time. */
static int find_plan(gck_state *state, PyObject *compress, gck_plan *plan)
{
    if (compress == NULL || compress == Py_None || compress == Py_False) {
        *plan = (gck_plan){NULL, 0, 0, 0, 0};
        return 0;
    }
    for (int i = 0; i < GCK_NPLANS; i++) {
        if (state->plans[i].key == compress) {
            *plan = state->plans[i].plan;
            return 0;
        }
    }
    if (parse_plan(state, compress, plan) < 0) {
        return -1;
    }
    if (!PyMapping_Check(compress) || PyUnicode_Check(compress)) {
        PyObject *oldest = state->plans[GCK_NPLANS - 1].key;
        memmove(&state->plans[1], &state->plans[0], sizeof state->plans[0] * (GCK_NPLANS - 1));
        state->plans[0].key = Py_NewRef(compress);
        state->plans[0].plan = *plan;
        Py_XDECREF(oldest);
    }
    return 0;
}

/* ---- the record ---- */

static int read_determinism(PyObject *value, int *check)
{
    *check = 1;
    if (value == NULL || (PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, "default") == 0)) {
        return 0;
    }
    *check = 0;
    if (PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, "none") == 0) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "determinism_check should be one of ['default', 'none'], but got %S", value);
    return -1;
}

/* Contexts of the two runs; NULL where there is none.  The callback of debug mode too. */
static int make_contexts(gck_state *state, const options *o, PyObject **forward, gck_frame *frame)
{
    const int debug = overridden(state, "_checkpoint_debug_enabled", o->debug, 0);
    const int custom = o->context_fn != NULL && o->context_fn != Py_None && o->context_fn != state->py.noop_context_fn;
    PyObject *made;
    int ok;

    *forward = NULL;
    if (debug < 0) {
        return -1;
    }
    if (debug && custom) {
        PyErr_SetString(PyExc_ValueError, "debug=True is incompatible with non-default context_fn");
        return -1;
    }
    if (!debug && !custom) {
        return 0;
    }
    made = debug ? PyObject_CallMethod(state->py.shim, "debug_contexts", NULL)
                 : PyObject_CallMethod(state->py.shim, "contexts", "O", o->context_fn);
    if (made == NULL) {
        return -1;
    }
    PyObject *f, *r, *callback;
    ok = PyArg_ParseTuple(made, "OOO", &f, &r, &callback);
    if (ok) {
        *forward = Py_NewRef(f);
        frame->recompute_context = Py_NewRef(r);
        frame->error_callback = callback != Py_None ? Py_NewRef(callback) : NULL;
    }
    Py_DECREF(made);
    return ok ? 0 : -1;
}

/* 1 when other saved-tensor hooks are active around us: payloads then go through them. */
static int outer_hooks(const gck_py *py)
{
    PyObject *top;
    int active;

    if (py->make_saved_tensor == NULL) {
        return 0;                                /* torch < 2.12 has no way to */
    }
    top = PyObject_CallFunctionObjArgs(py->top_hooks, Py_True, NULL);
    if (top == NULL) {
        return -1;
    }
    active = top != Py_None;
    Py_DECREF(top);
    return active;
}

/* Entries for all arguments.  *fed_args, *fed_kwargs: what the forward gets, owned by the
 * caller.  0 or -1. */
static int keep_arguments(gck_frame *frame, gck_packing *packing, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwargs, PyObject **fed_args, PyObject **fed_kwargs)
{
    const Py_ssize_t nkw = kwargs != NULL ? PyDict_Size(kwargs) : 0;
    PyObject *names = kwargs != NULL ? PySequence_Tuple(kwargs) : NULL;
    PyObject *value = NULL;

    *fed_args = PyTuple_New(nargs);
    *fed_kwargs = kwargs != NULL ? PyDict_New() : NULL;
    frame->kwnames = names;
    frame->args = calloc((size_t)(nargs + nkw) + 1, sizeof(gck_entry));
    if (frame->args == NULL) {
        PyErr_NoMemory();
    }
    if (*fed_args == NULL || (kwargs != NULL && (names == NULL || *fed_kwargs == NULL)) || frame->args == NULL) {
        return -1;
    }
    frame->nargs = nargs;
    frame->nkwargs = nkw;                        /* not yet packed entries are empty */
    for (Py_ssize_t i = 0; i < nargs; i++) {
        if (gck_entry_pack(packing, args[i], 1, &frame->args[i], &value) < 0) {
            return -1;
        }
        PyTuple_SetItem(*fed_args, i, value);
    }
    for (Py_ssize_t i = 0; i < nkw; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        int status = gck_entry_pack(packing, PyDict_GetItemWithError(kwargs, name), 0, &frame->args[nargs + i], &value);
        if (status == 0) {
            status = PyDict_SetItem(*fed_kwargs, name, value);
            Py_CLEAR(value);
        }
        if (status < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *pack(PyObject *frame, PyObject *x) { return (PyObject *)gck_frame_add((gck_frame *)frame, x); }

static PyMethodDef pack_def = {"pack", pack, METH_O, NULL};
static PyMethodDef unpack_def = {"unpack", gck_unpack, METH_O, NULL};

/* Push, call, pop: in one C function, so that no signal handler runs in between. */
static PyObject *call_recorded(gck_frame *frame, PyObject *context, PyObject *args, PyObject *kwargs)
{
    const gck_py *py = &frame->state->py;
    PyObject *result;

    if (gck_hooks_push(py, &pack_def, &unpack_def, (PyObject *)frame) < 0) {
        return NULL;
    }
    result = context == NULL ? PyObject_Call(frame->function, args, kwargs)
                             : PyObject_CallMethod(py->shim, "call_within", "OOOO", context, frame->function, args,
                                                   kwargs ? kwargs : Py_None);
    gck_hooks_pop(py);
    return result;
}

/* With an accelerator in this torch: 1 when its state exists already. */
static int accelerator_initialized(const gck_py *py)
{
    PyObject *value;
    int truth;

    if (!py->has_accelerator) {
        return 0;
    }
    value = PyObject_CallMethod(py->shim, "accelerator_initialized", NULL);
    truth = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return truth;
}

static int check_accelerator(const gck_py *py, int before)
{
    const int after = accelerator_initialized(py);

    if (after == 1 && before == 0) {
        PyErr_SetString(PyExc_RuntimeError, "PyTorch's device state was initialized in the forward pass "
                                            "of a Checkpoint, which is not allowed. Please open an issue "
                                            "if you need this feature.");
        return -1;
    }
    return after < 0 ? -1 : 0;
}

static void count_region(gck_state *state, const gck_plan *plan)
{
    state->stats.regions++;
    state->stats.regions_asked += plan->codec != NULL;
}

/* The call with grad on. */
static PyObject *record(gck_state *state, gck_frame *frame, const options *o, const gck_plan *plan, PyObject *context,
                        PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs)
{
    gck_packing packing = {state, *plan, 0, 0};
    const int preserve = truth_of(o->preserve_rng_state, 1);
    PyObject *fed_args = NULL, *fed_kwargs = NULL, *result = NULL;
    int initialized = 0;

    frame->function = Py_NewRef(o->function);
    frame->early_stop = overridden(state, "_enable_checkpoint_early_stop", o->early_stop, 1);
    if (preserve < 0 || frame->early_stop < 0) {
        return NULL;
    }
    if (plan->codec != NULL) {
        const int tracing = gck_tracing(&state->py);
        packing.outer = outer_hooks(&state->py);
        if (tracing < 0 || packing.outer < 0) {
            return NULL;
        }
        frame->asked = 1;
        if (tracing) {
            packing.plan.codec = NULL;
            state->stats.kept[GCK_KEEP_TRACING]++;
        }
    }
    count_region(state, plan);
    if (keep_arguments(frame, &packing, args, nargs, kwargs, &fed_args, &fed_kwargs) < 0) {
        goto exit;
    }
    frame->compressed = packing.payloads;
    if (gck_ambient_capture(&state->py, &frame->ambient, preserve, fed_args, fed_kwargs) < 0
        || (initialized = preserve ? accelerator_initialized(&state->py) : 1) < 0) {
        goto exit;
    }
    result = call_recorded(frame, context, fed_args, fed_kwargs);
    if (result != NULL && preserve && check_accelerator(&state->py, initialized) < 0) {
        Py_CLEAR(result);
    }
    if (result != NULL) {
        frame->phase = GCK_SAVED_PHASE;
    }

exit:
    Py_XDECREF(fed_args);
    Py_XDECREF(fed_kwargs);
    return result;
}

/* Grad off: torch too just calls the function, outside the contexts. */
static PyObject *call_plain(const options *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwargs)
{
    PyObject *tuple = PyTuple_New(nargs);
    PyObject *result = NULL;

    for (Py_ssize_t i = 0; tuple != NULL && i < nargs; i++) {
        PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
    }
    if (tuple != NULL) {
        result = PyObject_Call(o->function, tuple, kwargs);
        Py_DECREF(tuple);
    }
    return result;
}

static PyObject *call_reentrant(gck_state *state, const options *o, const gck_plan *plan, PyObject *const *args,
                                Py_ssize_t nargs, PyObject *kwargs)
{
    PyObject *list, *result;

    if (plan->codec != NULL) {
        PyErr_SetString(PyExc_ValueError, "gradckpt: compress= needs use_reentrant=False");
        return NULL;
    }
    list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < nargs; i++) {
        if (PyList_Append(list, args[i]) < 0) {
            Py_CLEAR(list);
        }
    }
    if (list == NULL) {
        return NULL;
    }
    result = PyObject_CallMethod(state->py.shim, "reentrant", "OOOOOOOO", o->function, list, kwargs ? kwargs : Py_None,
                                 o->use_reentrant, o->preserve_rng_state ? o->preserve_rng_state : Py_True,
                                 o->context_fn ? o->context_fn : Py_None,
                                 o->determinism_check ? o->determinism_check : Py_None,
                                 o->debug ? o->debug : Py_False);
    Py_DECREF(list);
    return result;
}

PyObject *gck_checkpoint(PyObject *module, PyObject *const *all, Py_ssize_t nall, PyObject *kwnames)
{
    gck_state *state = gck_state_of(module);
    PyObject *const *args = nall > 0 ? all + 1 : all;
    const Py_ssize_t nargs = nall > 0 ? nall - 1 : 0;
    PyObject *kwargs, *context = NULL, *result = NULL;
    gck_frame *frame = NULL;
    gck_plan plan;
    options o;
    int check;

    if (parse(all, nall, kwnames, &o, &kwargs) < 0) {
        return NULL;
    }
    if (find_plan(state, o.compress, &plan) < 0) {
        goto exit;
    }
    const int reentrant = o.use_reentrant == Py_None ? 1 : truth_of(o.use_reentrant, 0);
    if (reentrant != 0) {
        result = reentrant < 0 ? NULL : call_reentrant(state, &o, &plan, args, nargs, kwargs);
        goto exit;
    }
    frame = gck_frame_new(state);
    if (frame == NULL || read_determinism(o.determinism_check, &check) < 0
        || make_contexts(state, &o, &context, frame) < 0) {
        goto exit;
    }
    frame->check_metadata = check;
    result = gck_torch.aoti_torch_grad_mode_is_enabled()
        ? record(state, frame, &o, &plan, context, args, nargs, kwargs)
        : call_plain(&o, args, nargs, kwargs);

exit:
    Py_XDECREF(kwargs);
    Py_XDECREF(context);
    Py_XDECREF((PyObject *)frame);
    return result;
}
