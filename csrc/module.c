/* module.c: PyInit__C, which makes the module, its state and its functions. */
#include "gradckpt.h"
#include "torch/abi.h"
#include "torch/calls.h"
#include "torch/error.h"
#include "torch/objects.h"
#include "torch/ops.h"
#include "torch/simulated.h"
#include "torch/tensor.h"
#include "engine/codec_info.h"
#include "engine/memory_use.h"
#include "engine/offload_simulation.h"
#include "engine/place.h"
#include "engine/place_figures.h"
#include "engine/region_choice.h"
#include "engine/state.h"
#include "engine/checkpoint_options.h"
#include "engine/payload/codecs_encode.h"
#include "engine/payload/payload.h"
#include "engine/payload/payload_overflow.h"
#include "engine/payload/stats.h"
#include "engine/selective/op_outputs.h"
#include "engine/selective/op_policy.h"
#include "engine/selective/op_storage.h"
#include "engine/selective/replay_discrete.h"
#include "engine/selective/selective.h"
#include "engine/selective/selective_mode.h"
#include "engine/saved/saved_hooks.h"
#include "engine/saved/saved_node.h"
#include "engine/saved/saved_pins.h"
#include "engine/saved/saved_tensor.h"
#include "engine/region/checkpoint.h"
#include "engine/region/frame.h"
#include "engine/region/parameters.h"
#include "engine/region/recompute.h"
#include "engine/region/recompute_env.h"
#include "engine/region/region_node.h"
#include "engine/region/running.h"
#include "engine/region/saved_samples.h"

#include <stdlib.h>
#include <string.h>

#ifndef GCK_BUILD_NOTE
#define GCK_BUILD_NOTE "unknown build"
#endif

/* ---- build ---- */

/* New list, or NULL: the names of the optional symbols that this libtorch lacks. */
static PyObject *missing_symbols(void)
{
    PyObject *names = PyList_New(0);

#define SYMBOL(necessity, type, symbol, arguments)                                \
    if (names != NULL && gck_torch.symbol == NULL) {                              \
        gck_add_item(&names, PyUnicode_FromString(#symbol));                      \
    }
    GCK_ABI_SYMBOLS(SYMBOL)
#undef SYMBOL
    return names;
}

static PyObject *build_info(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    int driver, runtime;
    const int status = gck_cuda_check(&driver, &runtime);

    return Py_BuildValue("{ss ss ss si si sO ss sN}", "build", GCK_BUILD_NOTE, "cuda_archs", gck_cuda_archs(), "isa",
                         gck_isa_name(), "cuda_driver", driver, "cuda_runtime", runtime, "cuda_usable",
                         status == GCK_OK ? Py_True : Py_False, "compiler", __VERSION__, "missing", missing_symbols());
}

static PyObject *forget_random_state(PyObject *module, PyObject *Py_UNUSED(unused))
{
    Py_CLEAR(gck_state_of(module)->py.rng.latest);
    Py_RETURN_NONE;
}

static PyObject *bind(PyObject *module, PyObject *table)
{
    return gck_py_bind(&gck_state_of(module)->py, table) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *rounding_state(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const gck_rounding *r = &gck_state_of(module)->rounding;

    return Py_BuildValue("II", r->restored ? r->step + 1 : r->step, r->restored ? 0u : r->tensor);
}

static PyObject *set_rounding_state(PyObject *module, PyObject *args)
{
    gck_rounding r = {.step = 0};

    if (!PyArg_ParseTuple(args, "II:set_rounding_state", &r.step, &r.tensor)) {
        return NULL;
    }
    gck_state_of(module)->rounding = r;
    Py_RETURN_NONE;
}

static PyObject *observe_regions(PyObject *module, PyObject *observer)
{
    gck_state *state = gck_state_of(module);
    GCK_SCOPED PyObject *old = state->observer;

    state->observer = observer == Py_None ? NULL : Py_NewRef(observer);
    Py_RETURN_NONE;
}

/* ---- the module ---- */

static PyMethodDef methods[] = {
    {"checkpoint", (PyCFunction)(void (*)(void))gck_checkpoint, METH_FASTCALL | METH_KEYWORDS, gck_checkpoint_doc},
    {"encode", gck_encode_py, METH_VARARGS,
     "encode(x, codec, dither=None, /)\n--\n\nReturn the Payload of a tensor. dither is (seed, step, tensor)."},
    {"codecs", gck_codecs_py, METH_NOARGS, "codecs()\n--\n\nReturn the names of the codecs."},
    {"codec_info", gck_codec_info_py, METH_O, "codec_info(name, /)\n--\n\nDescribe a codec as a dict."},
    {"isa", gck_isa_py, METH_NOARGS, "isa()\n--\n\nReturn the instruction set of the CPU codecs."},
    {"force_isa", gck_force_isa_py, METH_O,
     "force_isa(name, /)\n--\n\nForce an instruction set, for tests; None restores the best."},
    {"build_info", build_info, METH_NOARGS, "build_info()\n--\n\nDescribe the build of this extension as a dict."},
    {"is_recomputing", gck_is_recomputing, METH_NOARGS,
     "is_recomputing()\n--\n\nReturn whether the calling thread runs a region again for its backward.\n\n"
     "Code that counts, logs or updates its own state checks this, to do so once per step."},
    {"running_region", gck_running_region, METH_NOARGS,
     "running_region()\n--\n\nReturn (calls, replay, preserve_rng_state, approximate, tensors saved so far, pack, "
     "unpack) of the innermost region that runs in this thread, or None."},
    {"is_name_wanted", gck_is_name_wanted, METH_O,
     "is_name_wanted(match, /)\n--\n\n"
     "Return whether match(names, compressed) is true for a policy of the innermost region."},
    {"cpu_rng_state", gck_cpu_rng_state, METH_NOARGS,
     "cpu_rng_state()\n--\n\nReturn the state of the CPU's generator: the same object until something is drawn."},
    {"set_cpu_rng_state", gck_set_cpu_rng_state, METH_O,
     "set_cpu_rng_state(state, /)\n--\n\nSet the CPU's generator to such a state."},
    {"hooks_around_region", gck_hooks_around_region, METH_NOARGS,
     "hooks_around_region()\n--\n\nReturn the saved-tensor hooks that see what the innermost region keeps, or None."},
    {"sample_anew", gck_sample_anew, METH_O,
     "sample_anew(on, /)\n--\n\n"
     "With True, look at each kind of region anew; with what that returned, forget what was seen since."},
    {"hide_operators", gck_hide_operators, METH_O,
     "hide_operators(by, /)\n--\n\nHide operators from the innermost region of this thread (1), or no longer (-1). "
     "Return whether its policy is a function."},
    {"forget_types", gck_forget_types, METH_NOARGS,
     "forget_types()\n--\n\nForget which types of modules have no rule, for gradckpt._engine.buffers."},
    {"guard_hooks", gck_guard_hooks, METH_VARARGS,
     "guard_hooks(hooks, type, kind, /)\n--\n\nGuard the hooks of a parameter, for gradckpt._engine.parameter_hooks."},
    {"hooks_are_lossy", gck_saved_hooks_are_lossy_py, METH_NOARGS,
     "hooks_are_lossy()\n--\n\nReturn whether the innermost saved-tensor hooks are ours and keep tensors lossily."},
    {"saved_push", gck_saved_hooks_push, METH_VARARGS,
     "saved_push(compress, formats, place, /)\n--\n\nPush the hooks of gradckpt.compress_saved()."},
    {"saved_pair", gck_saved_hooks_pair, METH_VARARGS,
     "saved_pair(compress, formats, place, /)\n--\n\nReturn (pack, unpack) of gradckpt.compress_saved()."},
    {"saved_functions", gck_saved_functions, METH_NOARGS,
     "saved_functions()\n--\n\nReturn Functions of libraries: (package, node, places, why they stay exact or None)."},
    {"saved_nodes", gck_saved_nodes, METH_NOARGS,
     "saved_nodes()\n--\n\nReturn by a node's name its rows, (argument, role, operators or None), or its kind."},
    {"saved_roles", gck_saved_roles, METH_NOARGS,
     "saved_roles()\n--\n\nReturn what a lossy codec may encode: (node, argument, operators or None, how)."},
    {"saved_pop", gck_saved_hooks_pop, METH_O,
     "saved_pop(failed, /)\n--\n\nPop the hooks of gradckpt.compress_saved()."},
    {"saved_call", gck_saved_hooks_call, METH_VARARGS,
     "saved_call(compress, formats, place, function, args, kwargs, /)\n--\n\n"
     "Call a function under gradckpt.compress_saved()."},
    {"rounding_state", rounding_state, METH_NOARGS,
     "rounding_state()\n--\n\nReturn the state as gradckpt.config.get_rounding_state() does."},
    {"set_rounding_state", set_rounding_state, METH_VARARGS,
     "set_rounding_state(step, tensor, /)\n--\n\nSet the state as gradckpt.config.set_rounding_state() does."},
    {"observe_regions", observe_regions, METH_O,
     "observe_regions(observer, /)\n--\n\nCall observer(frame) for each region that has kept its arguments, for "
     "gradckpt._memory; None ends it."},
    {"late_overflow", gck_late_overflow, METH_O,
     "late_overflow(seconds, /)\n--\n\nMake CPU codecs report overflow as late as a device, for tests. A forward "
     "that is far ahead waits this long for them; 0 ends it."},
    {"settle_overflow", gck_settle_overflow, METH_NOARGS,
     "settle_overflow()\n--\n\nWrite the late overflow flags, for tests."},
    {"figures_of_ended_places", gck_figures_of_ended_places, METH_VARARGS,
     "figures_of_ended_places(restart=False, /)\n--\n\nReturn what places have counted that ended, since a restart."},
    {"add_device", gck_add_device, METH_O, "add_device(kind, /)\n--\n\nAdd a gck_device_kind, of PrivateUse1."},
    {"make_op_policy", gck_make_op_policy, METH_VARARGS,
     "make_op_policy(rows, wanted, /)\n--\n\n"
     "Make an OpPolicy of rows (operator, keep, compress, every, phase, group, form, mixing)."},
    {"make_op_storage", gck_make_op_storage, METH_VARARGS,
     "make_op_storage(names, mutation, reusable, approximate_inputs, /)\n--\n\n"
     "Make an empty OpStorage for one region."},
    {"selective_name", gck_selective_name, METH_VARARGS,
     "selective_name(x, name, modes, /)\n--\n\nName a tensor for gradckpt.policies.name()."},
    {"catcher", gck_catcher, METH_O, "catcher(operator, /)\n--\n\nReturn the kernel that catches the operator."},
    {"selective_key", gck_selective_key, METH_NOARGS,
     "selective_key()\n--\n\nReturn the dispatch key at which catchers are registered, or None."},
    {"catch_by_mode", gck_catch_by_mode, METH_O,
     "catch_by_mode(on, /)\n--\n\nCatch operators by modes only, not on the dispatch key, for tests."},
    {"replace_checkpoint", gck_replace_checkpoint_py, METH_O,
     "replace_checkpoint(by, /)\n--\n\n"
     "Count one more (1) or one less (-1) region that needs gradckpt's checkpoint for torch's."},
    {"eligible", gck_eligible_py, METH_VARARGS,
     "eligible(requires_grad, is_leaf, floating, fake_quantize, /)\n--\n\nReturn whether compress= compresses such a "
     "tensor, if its codec takes it."},
    {"replays_discrete", gck_replays_discrete_py, METH_NOARGS,
     "replays_discrete()\n--\n\nReturn whether the calling thread runs a region that keeps discrete outputs."},
    {"forget_random_state", forget_random_state, METH_NOARGS,
     "forget_random_state()\n--\n\nFree the CPU generator's state that the next region would share."},
    {"bind", bind, METH_O, "bind(callbacks, /)\n--\n\nBind the Python functions that C calls, from a dict by name."},
    {"stats", gck_stats_py, METH_NOARGS, "stats()\n--\n\nReturn the raw counters of gradckpt.stats()."},
    {"reset_stats", gck_reset_stats_py, METH_NOARGS, "reset_stats()\n--\n\nReset all but what counts live payloads."},
    {"restart_peak", gck_restart_peak_py, METH_NOARGS, "restart_peak()\n--\n\nReturn both peaks; begin them anew."},
    {"is_simulated", gck_is_simulated_py, METH_NOARGS,
     "is_simulated()\n--\n\nReturn whether this thread runs a simulated step."},
    {"choose_options", (PyCFunction)(void (*)(void))gck_choose_options_py, METH_VARARGS | METH_KEYWORDS,
     "choose_options(regions, options, kept, need, time, error, last_need, budget, error_budget=0, buckets=4096)\n"
     "--\n\nChoose an option for each region of a chain; csrc/planner/planner.h describes the problem."},
    {"memory_use", gck_memory_use_py, METH_O,
     "memory_use(changes, /)\n--\n\nPlay a trace; csrc/planner/caching_allocator.h."},
    {"simulate_offload", (PyCFunction)(void (*)(void))gck_simulate_offload_py, METH_VARARGS | METH_KEYWORDS,
     "simulate_offload(regions, *, rate_out, rate_in, latency, ring, held, head)\n--\n\n"
     "Simulate a step whose payloads are offloaded; csrc/offload/simulate.h has the rules."},
    {"simulated_placed", gck_simulated_placed_py, METH_NOARGS,
     "simulated_placed()\n--\n\nReturn the bytes that got a place so far, and the most of one since the last call."},
    {"set_simulated", gck_set_simulated_py, METH_VARARGS,
     "set_simulated(first, end, is_device, /)\n--\n\nLeave these addresses untouched in this thread; 0, 0: none."},
    {NULL, NULL, 0, NULL},
};

/* Raise ImportError with torch's version, or None where it has none, and what is missing. */
static void raise_missing(const char *missing)
{
    GCK_SCOPED PyObject *torch = PyImport_ImportModule("torch");
    GCK_SCOPED PyObject *version = torch ? PyObject_GetAttrString(torch, "__version__") : NULL;

    PyErr_Clear();
    PyErr_Format(PyExc_ImportError, "gradckpt: torch %S has no %s; run: pip install --upgrade 'torch>=2.11'",
                 version ? version : Py_None, missing);
}

/* Load libtorch's symbols and register the operators.  0 or -1 with ImportError. */
static int load_torch(void)
{
    GCK_SCOPED PyObject *torch = PyImport_ImportModule("torch");
    GCK_SCOPED PyObject *file = torch ? PyObject_GetAttrString(torch, "__file__") : NULL;
    GCK_SCOPED PyObject *path = file != NULL && PyUnicode_Check(file) ? PyUnicode_EncodeFSDefault(file) : NULL;
    char lib[4096] = "";
    const char *missing;

    if (torch == NULL && PyErr_ExceptionMatches(PyExc_ModuleNotFoundError)) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ImportError, "gradckpt: torch is not installed; run: pip install 'torch>=2.11'");
    } else if (torch != NULL && file == NULL) {
        gck_clear_attribute_error();
    }
    if (path != NULL && (size_t)PyBytes_Size(path) + 8 < sizeof lib) {
        strcpy(lib, PyBytes_AsString(path));     /* .../torch/__init__.py -> .../torch/lib */
        char *slash = strrchr(lib, '/');
        strcpy(slash != NULL ? slash : lib, "/lib");
    }
    if (PyErr_Occurred()) {
        return -1;
    }
    missing = gck_abi_load(&gck_torch, lib);
    if (missing != NULL) {
        raise_missing(missing);
        return -1;
    }
    missing = gck_ops_register();
    if (missing != NULL) {
        return gck_done(PyErr_Format(
            PyExc_ImportError,
            "gradckpt: torch rejected %s; install a torch that gradckpt was tested with", missing));
    }
    return 0;
}

static int choose_isa(void)
{
    const char *forced = secure_getenv("GRADCKPT_ISA");

    if (forced == NULL || forced[0] == '\0' || gck_isa_force(forced) == 0) {
        return 0;
    }
    return gck_done(PyErr_Format(
        PyExc_ImportError, "gradckpt: GRADCKPT_ISA=%s is %s; use scalar, avx2 or avx512, or unset it", forced,
        gck_isa_supported(forced) < 0 ? "not known" : "not supported by this CPU"));
}

/* gradckpt.compat.checkpoint: a builtin of that name and module, for repr and pickle. */
static PyMethodDef compat_def = {"checkpoint", (PyCFunction)(void (*)(void))gck_compat_checkpoint,
                                 METH_FASTCALL | METH_KEYWORDS, gck_compat_checkpoint_doc};

static int add_compat(PyObject *module)
{
    GCK_SCOPED PyObject *name = PyUnicode_FromString("gradckpt.compat");
    GCK_SCOPED PyObject *function = name != NULL ? PyCFunction_NewEx(&compat_def, module, name) : NULL;
    return function == NULL ? -1 : PyModule_AddObjectRef(module, "compat_checkpoint", function);
}

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
}

/* What Python must know by the same number. */
static int add_constants(PyObject *module)
{
    static const struct { const char *name; long value; } constants[] = {
        {"GROUP", GCK_GROUP},
        {"BLOCK", GCK_BLOCK},
        {"LEAST_ROW", GCK_LEAST_ROW},
        {"OP_RECOMPUTE", GCK_OP_RECOMPUTE},
        {"OP_SAVE", GCK_OP_SAVE},
        {"OP_REPLAY", GCK_OP_REPLAY},
        {"OP_REPLAY_CAST", GCK_OP_REPLAY_CAST},
        {"OP_LABEL", GCK_OP_LABEL},
        {"OP_REPLAY_CHOICE", GCK_OP_REPLAY_CHOICE},
        {"OP_PRODUCT", GCK_OP_PRODUCT},
        {"OP_SEPARATE", GCK_OP_SEPARATE},
        {"OP_JOINT", GCK_OP_JOINT},
        {"OP_UNKNOWN", GCK_OP_UNKNOWN},
    };

    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) {
            return -1;
        }
    }
    return 0;
}

static int module_exec(PyObject *module)
{
    gck_state *state = gck_state_of(module);

    state->last_step = state->watched_task = -1;
    if (choose_isa() < 0 || load_torch() < 0 || gck_py_load(&state->py) < 0
        || (state->Payload = add_type(module, &gck_payload_spec)) == NULL
        || (state->Frame = add_type(module, &gck_frame_spec)) == NULL
        || (state->Holder = add_type(module, &gck_holder_spec)) == NULL
        || (state->Recompute = add_type(module, &gck_recompute_spec)) == NULL
        || (state->OpPolicy = add_type(module, &gck_op_policy_spec)) == NULL
        || (state->OpStorage = add_type(module, &gck_op_storage_spec)) == NULL
        || (state->OpOutput = add_type(module, &gck_op_output_spec)) == NULL
        || (state->Context = add_type(module, &gck_context_spec)) == NULL
        || (state->SavedHooks = add_type(module, &gck_saved_hooks_spec)) == NULL
        || (state->SavedTensor = add_type(module, &gck_saved_tensor_spec)) == NULL
        || (state->Place = add_type(module, &gck_place_spec)) == NULL
        || (state->stateless = PyDict_New()) == NULL
        || (state->closed = PyDict_New()) == NULL
        || gck_node_classes(module, state) < 0
        || PyModule_AddObjectRef(module, "SelectiveRecompute", state->SelectiveRecompute) < 0) {
        return -1;
    }
    return add_compat(module) < 0 || add_constants(module) < 0 || PyModule_AddType(module, state->Context) < 0
        || PyModule_AddType(module, state->SavedTensor) < 0 || PyModule_AddType(module, state->Payload) < 0
        || PyModule_AddType(module, state->Place) < 0 ? -1 : 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    return gck_state_traverse(gck_state_of(module), visit, arg);
}

static int module_clear(PyObject *module)
{
    gck_pins_clear(gck_state_of(module));
    gck_state_clear(gck_state_of(module));
    return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "gradckpt._C",
    .m_doc = "The C half of gradckpt: codecs and checkpoint engine.",
    .m_size = sizeof(gck_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
