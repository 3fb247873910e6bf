/* checkpoint_options.c: reads the keywords of checkpoint().  Names are compared as interned objects, because a
 * region may be called with a dozen keywords of its own, many times a step. */
#include "engine/checkpoint_options.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "engine/place.h"

#include <string.h>

/* How many options there are, torch's first. */
enum {
#define OPTION(name) +1
    NTORCH = GCK_TORCH_OPTIONS(OPTION),
    NOPTIONS = GCK_OPTIONS(OPTION),
#undef OPTION
};

static PyObject **option_slot(gck_state *state, gck_options *o, PyObject *name)
{
    PyObject **slots[] = {
#define OPTION(field) &o->field,
        GCK_OPTIONS(OPTION)
#undef OPTION
    };
    PyObject *const names[] = {
#define OPTION(field) state->py.names.field,
        GCK_OPTIONS(OPTION)
#undef OPTION
    };
    const int n = o->exact ? NTORCH : NOPTIONS;

    for (int i = 0; i < n; i++) {
        if (names[i] == name) {
            return slots[i];
        }
    }
    return name == state->py.names.function ? &o->function : NULL;
}

static int is_text(PyObject *value, const char *text)
{
    return PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, text) == 0;
}

static int read_buffers(const gck_state *state, gck_options *o)
{
    const int given = o->buffers != NULL && o->buffers != Py_None, once = given && is_text(o->buffers, "once");

    o->once = o->exact || (given && is_text(o->buffers, "torch")) ? NULL : !given || once ? Py_None : o->buffers;
    if (!given || o->once == NULL || (once && o->function == NULL)) {
        return 0;
    }
    return gck_done(PyObject_CallFunction(state->py.call.check_buffers, "OO", o->buffers,
                                        o->function != NULL ? o->function : Py_None));
}

int gck_options_parse(gck_state *state, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, int exact,
                      gck_options *o, PyObject **kwargs)
{
    const Py_ssize_t nkw = kwnames != NULL ? PyTuple_Size(kwnames) : 0;
    int status = 0;

    memset(o, 0, sizeof *o);
    o->exact = exact;
    o->function = nargs > 0 ? args[0] : NULL;
    *kwargs = NULL;
    for (Py_ssize_t i = 0; status == 0 && i < nkw; i++) {
        GCK_SCOPED PyObject *name = Py_NewRef(PyTuple_GetItem(kwnames, i));
        PyObject *value = args[nargs + i];
        PyUnicode_InternInPlace(&name);
        PyObject **slot = option_slot(state, o, name);
        if (slot == &o->function && o->function != NULL) {
            PyErr_SetString(PyExc_TypeError, "checkpoint() got multiple values for argument 'function'");
            status = -1;
        } else if (slot != NULL) {
            *slot = value;
        } else if ((*kwargs == NULL && (*kwargs = PyDict_New()) == NULL) || PyDict_SetItem(*kwargs, name, value) < 0) {
            status = -1;
        }
    }
    status = status < 0 ? -1 : read_buffers(state, o);
    if (status < 0) {
        Py_CLEAR(*kwargs);
    }
    return status;
}

int gck_truth(PyObject *value, int missing)
{
    return value == NULL ? missing : value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
}

int gck_options_overridden(const gck_state *state, PyObject *name, PyObject *argument, int missing)
{
    PyObject *globals = PyModule_GetDict(state->py.checkpoint_module);
    PyObject *global = globals != NULL ? PyDict_GetItemWithError(globals, name) : NULL;      /* borrowed */

    if (global == NULL && PyErr_Occurred()) {
        return -1;
    }
    return global == NULL || global == Py_None ? gck_truth(argument, missing) : gck_truth(global, 0);
}

int gck_options_custom_context(const gck_state *state, const gck_options *o)
{
    return o->context_fn != NULL && o->context_fn != state->py.noop_context_fn
        && (o->exact || o->context_fn != Py_None);
}

int gck_options_policy(const gck_options *o)
{
    return o->policy != NULL && o->policy != Py_None;
}

int gck_options_determinism(const gck_state *state, PyObject *value, int exact, gck_check *check,
                            PyObject **metadata_fn)
{
    GCK_SCOPED PyObject *read = value == NULL ? Py_NewRef(Py_True)
                              : PyObject_CallFunction(state->py.call.determinism_check, "Oi", value, exact);

    *check = read == Py_None ? GCK_CHECK_NOTHING : read == Py_False ? GCK_CHECK_WARNS : GCK_CHECK_RAISES;
    *metadata_fn = read != NULL && PyCallable_Check(read) ? Py_NewRef(read) : NULL;
    return read == NULL ? -1 : 0;
}

/* ---- compress= ---- */

int gck_plan_is_lossy(const gck_plan *plan)
{
    return plan->codec != NULL && plan->codec->max_error > 0 && !plan->fake_quantize;
}

static int parse_plan(gck_state *state, PyObject *compress, gck_plan *plan)
{
    GCK_SCOPED PyObject *parsed = PyObject_CallFunction(state->py.call.parse_plan, "(O)", compress);  /* one tuple */
    const char *codec = NULL;
    long long min_numel = 0;
    unsigned long long seed = 0;

    *plan = (gck_plan){.codec = NULL};
    if (parsed == NULL || !PyArg_ParseTuple(parsed, "zLppipK", &codec, &min_numel, &plan->fake_quantize,
                                            &plan->floating, &plan->replay_discrete, &plan->stochastic, &seed)) {
        return -1;
    }
    if (codec != NULL) {
        plan->min_numel = min_numel;
        plan->seed = seed;
        plan->codec = gck_codec_find(codec);
        plan->fake_quantize &= plan->codec->max_error > 0;  /* an exact codec restores what the forward has anyway */
    }
    return 0;
}

/* Names and CompressionConfigs are immutable, and the same few objects come again and again, so the
 * latest are remembered by identity.  A mapping may change and is read every time. */
int gck_options_plan(gck_state *state, PyObject *compress, gck_plan *plan)
{
    if (compress == NULL || compress == Py_None || compress == Py_False) {
        *plan = (gck_plan){.codec = NULL};
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
        GCK_SCOPED PyObject *oldest = state->plans[GCK_NPLANS - 1].key;
        memmove(&state->plans[1], &state->plans[0], sizeof state->plans[0] * (GCK_NPLANS - 1));
        state->plans[0].key = Py_NewRef(compress);
        state->plans[0].plan = *plan;
    }
    return 0;
}

/* ---- offload= ---- */

int gck_options_place(gck_state *state, PyObject *offload, gck_plan *plan, PyObject **place)
{
    if (gck_place_of(state, offload, place) < 0) {
        return -1;
    }
    if (*place != NULL && plan->codec == NULL && gck_options_plan(state, state->py.names.raw, plan) < 0) {
        Py_CLEAR(*place);
        return -1;
    }
    plan->place = *place;
    return 0;
}

int gck_options_kept(gck_state *state, PyObject *kept, gck_plan *plan)
{
    PyObject *compress = kept, *offload = NULL;
    GCK_SCOPED PyObject *place = NULL;           /* the tuple has it, too */

    if ((PyTuple_Check(kept) && !PyArg_ParseTuple(kept, "OO:kept", &compress, &offload))
        || gck_options_plan(state, compress, plan) < 0) {
        return -1;
    }
    return gck_options_place(state, offload, plan, &place);
}

gck_skip_reason gck_eligible(const gck_plan *plan, int requires_grad, int leaf, int parameter)
{
    /* include="floating" takes all floating tensors.  A parameter stays alive anyway, and so does
     * every leaf that requires grad: autograd's AccumulateGrad holds it.  A fake-quantized forward
     * replaces x by a result of x, which is not a leaf, so there include="floating" skips leaves
     * too. */
    const int leaves = plan->floating && !plan->fake_quantize;

    if (!requires_grad && !plan->floating) {
        return GCK_SKIP_NO_GRAD;
    }
    return parameter || (requires_grad && leaf && !leaves) ? GCK_SKIP_LEAF : GCK_COMPRESS;
}

PyObject *gck_eligible_py(PyObject *Py_UNUSED(module), PyObject *args)
{
    gck_plan plan = {.codec = NULL};
    int requires_grad, leaf;

    if (!PyArg_ParseTuple(args, "pppp", &requires_grad, &leaf, &plan.floating, &plan.fake_quantize)) {
        return NULL;
    }
    return PyBool_FromLong(gck_eligible(&plan, requires_grad, leaf, 0) == GCK_COMPRESS);
}
