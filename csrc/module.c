/* module.c: PyInit__C: the module, its state, its functions. */
#include <stdlib.h>
#include <string.h>

#include "engine/checkpoint.h"
#include "engine/node.h"
#include "engine/parameters.h"
#include "engine/pending.h"
#include "engine/rerun.h"
#include "engine/saved.h"
#include "engine/saver.h"
#include "engine/selective.h"
#include "engine/stand_in.h"
#include "torch/ops.h"

#ifndef GCK_BUILD_NOTE
#define GCK_BUILD_NOTE "unknown build"
#endif

gck_state *gck_state_of(PyObject *module) { return PyModule_GetState(module); }

/* ---- codecs ---- */

static PyObject *codecs(PyObject *module, PyObject *unused)
{
    PyObject *names = PyList_New(0);

    (void)module;
    (void)unused;
    for (int i = 0; names != NULL && gck_codec_at(i) != NULL; i++) {
        PyObject *name = PyUnicode_FromString(gck_codec_at(i)->name);
        if (name == NULL || PyList_Append(names, name) < 0) {
            Py_CLEAR(names);
        }
        Py_XDECREF(name);
    }
    return names;
}

static const char *const dtype_names[GCK_NDTYPES] = {"float32", "float16", "bfloat16", "bool"};

/* {dtype: (bits per value, bytes per value, per group of 128, per block of 4096)}, or NULL. */
static PyObject *sizes_of(const gck_codec *codec)
{
    PyObject *sizes = PyDict_New();

    for (int d = 0; sizes != NULL && d < GCK_NDTYPES; d++) {
        const gck_size size = codec->size[d];
        PyObject *item = NULL;
        if (!(codec->dtypes & GCK_BIT(d))) {
            continue;
        }
        item = Py_BuildValue("(diii)", gck_bits_per_value(codec, (gck_dtype)d), size.value, size.group, size.block);
        if (item == NULL || PyDict_SetItemString(sizes, dtype_names[d], item) < 0) {
            Py_CLEAR(sizes);
        }
        Py_XDECREF(item);
    }
    return sizes;
}

/* Of bfloat16, where it depends on the dtype; 0 when it is the dtype's own. */
static double bits_per_value(const gck_codec *codec)
{
    const gck_dtype order[GCK_NDTYPES] = {GCK_BF16, GCK_F32, GCK_F16, GCK_BOOL};

    for (int i = 0; i < GCK_NDTYPES; i++) {
        if (codec->dtypes & GCK_BIT(order[i])) {
            const double bits = gck_bits_per_value(codec, order[i]);
            return bits == 16 && order[i] == GCK_BF16 ? 0 : bits;
        }
    }
    return 0;
}

static PyObject *codec_info(PyObject *module, PyObject *arg)
{
    const char *name = PyUnicode_Check(arg) ? PyUnicode_AsUTF8AndSize(arg, NULL) : NULL;
    const gck_codec *codec = name != NULL ? gck_codec_find(name) : NULL;
    PyObject *accepted = NULL, *sizes = NULL;

    (void)module;
    if (codec == NULL) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "gradckpt: unknown codec %R", arg);
    }
    sizes = sizes_of(codec);
    accepted = sizes != NULL ? PyDict_Keys(sizes) : NULL;
    return Py_BuildValue("{ss si ss sN sd sd sO sO sO sN}", "name", codec->name, "id", gck_codec_id(codec), "summary",
                         codec->summary, "dtypes", accepted, "bits_per_value", bits_per_value(codec), "max_error",
                         codec->max_error, "cuda", codec->encode != NULL ? Py_True : Py_False, "stochastic",
                         codec->stochastic ? Py_True : Py_False, "refuses", codec->refuses ? Py_True : Py_False, "sizes",
                         sizes);
}

/* ---- instruction set, build ---- */

static PyObject *isa(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(gck_isa_name());
}

static PyObject *force_isa(PyObject *module, PyObject *arg)
{
    const char *name = arg == Py_None ? NULL : PyUnicode_AsUTF8AndSize(arg, NULL);

    (void)module;
    if (name == NULL && arg != Py_None) {
        return NULL;
    }
    if (gck_isa_force(name) != 0) {
        return PyErr_Format(PyExc_ValueError, "gradckpt: instruction set %R is %s; there are scalar, avx2 and avx512",
                            arg, gck_isa_supported(name) < 0 ? "not known" : "not supported by this CPU");
    }
    Py_RETURN_NONE;
}

/* Names of the optional symbols that this libtorch lacks: a new list, or NULL. */
static PyObject *missing_symbols(void)
{
    PyObject *names = PyList_New(0);

#define SYMBOL(necessity, type, symbol, arguments)                                \
    if (names != NULL && gck_torch.symbol == NULL) {                              \
        PyObject *name = PyUnicode_FromString(#symbol);                           \
        if (name == NULL || PyList_Append(names, name) < 0) {                     \
            Py_CLEAR(names);                                                      \
        }                                                                         \
        Py_XDECREF(name);                                                         \
    }
    GCK_ABI_SYMBOLS(SYMBOL)
#undef SYMBOL
    return names;
}

static PyObject *build_info(PyObject *module, PyObject *unused)
{
    int driver, runtime;
    const int status = gck_cuda_check(&driver, &runtime);

    (void)module;
    (void)unused;
    return Py_BuildValue("{ss ss ss si si sO ss sN}", "build", GCK_BUILD_NOTE, "cuda_archs", gck_cuda_archs(), "isa",
                         gck_isa_name(), "cuda_driver", driver, "cuda_runtime", runtime, "cuda_usable",
                         status == GCK_OK ? Py_True : Py_False, "compiler", __VERSION__, "missing", missing_symbols());
}

/* ---- stats ---- */

/* Every counter once: field, and the key in the dict. */
#define COUNTERS(COUNTER)                                                                                     \
    COUNTER(steps) COUNTER(regions) COUNTER(regions_asked) COUNTER(regions_compressed) COUNTER(recomputes)    \
    COUNTER(asked) COUNTER(compressed) COUNTER(encoded) COUNTER(shared) COUNTER(bytes_in) COUNTER(bytes_out) COUNTER(live_bytes)                 \
    COUNTER(peak_live_bytes) COUNTER(originals_alive) COUNTER(originals_alive_bytes) COUNTER(decisions)    \
    COUNTER(decision_bytes) COUNTER(kept_bytes) COUNTER(policy_outputs)           \
    COUNTER(policy_bytes)

static int set_counter(PyObject *dict, const char *key, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    const int status = number == NULL ? -1 : PyDict_SetItemString(dict, key, number);

    Py_XDECREF(number);
    return status;
}

static PyObject *stats(PyObject *module, PyObject *unused)
{
    gck_state *state = gck_state_of(module);
    const gck_stats *s = &state->stats;
    PyObject *dict = PyDict_New(), *kept = PyDict_New();
    int status = dict == NULL || kept == NULL ? -1 : 0;

    (void)unused;
    gck_pending_poll(state);
#define COUNTER(name) if (status == 0) { status = set_counter(dict, #name, s->name); }
    COUNTERS(COUNTER)
#undef COUNTER
    for (int r = 1; r < GCK_NREASONS && status == 0; r++) {
        status = s->kept[r] ? set_counter(kept, gck_reason_text[r], s->kept[r]) : 0;
    }
    if (status == 0) {
        status = PyDict_SetItemString(dict, "kept", kept);
    }
    Py_XDECREF(kept);
    if (status < 0) {
        Py_CLEAR(dict);
    }
    return dict;
}

static PyObject *reset_stats(PyObject *module, PyObject *unused)
{
    gck_state *state = gck_state_of(module);
    const int64_t live = state->stats.live_bytes;

    (void)unused;
    state->stats = (gck_stats){.live_bytes = live, .peak_live_bytes = live};   /* payloads live on */
    state->last_step = state->watched_task = -1;
    state->epoch++;
    Py_RETURN_NONE;
}

static PyObject *rounding_state(PyObject *module, PyObject *unused)
{
    const gck_rounding *r = &gck_state_of(module)->rounding;

    (void)unused;
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
    PyObject *old = state->observer;

    state->observer = observer == Py_None ? NULL : Py_NewRef(observer);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* ---- the module ---- */

static PyMethodDef methods[] = {
    {"checkpoint", (PyCFunction)(void (*)(void))gck_checkpoint, METH_FASTCALL | METH_KEYWORDS, gck_checkpoint_doc},
    {"encode", gck_encode_py, METH_VARARGS, "encode(x, codec, dither=None, /)\n--\n\nThe Payload of a tensor; codec: a full name; dither: (seed, step, tensor)."},
    {"codecs", codecs, METH_NOARGS, "codecs()\n--\n\nNames of the codecs."},
    {"codec_info", codec_info, METH_O, "codec_info(name, /)\n--\n\nWhat a codec is, as a dict."},
    {"isa", isa, METH_NOARGS, "isa()\n--\n\nInstruction set of the CPU codecs."},
    {"force_isa", force_isa, METH_O, "force_isa(name, /)\n--\n\nFor tests: force an instruction set; None: the best."},
    {"build_info", build_info, METH_NOARGS, "build_info()\n--\n\nHow this extension was built, as a dict."},
    {"is_recomputing", gck_is_recomputing, METH_NOARGS,
     "is_recomputing()\n--\n\n"
     "True while the calling thread runs a region again for its backward: for code that counts, logs or updates\n"
     "state of its own, and must do so once a step."},
    {"forget_types", gck_forget_types, METH_NOARGS,
     "forget_types()\n--\n\nFor gradckpt.buffers: what was known of types of modules holds no more."},
    {"guard_hooks", gck_guard_hooks, METH_VARARGS,
     "guard_hooks(hooks, type, kind, /)\n--\n\nFor gradckpt._hooks: guard the hooks of a parameter."},
    {"saved_push", gck_saver_push, METH_O, "saved_push(compress, /)\n--\n\nSee gradckpt.compress_saved()."},
    {"saved_pop", gck_saver_pop, METH_O, "saved_pop(failed, /)\n--\n\nSee gradckpt.compress_saved()."},
    {"saved_call", gck_saver_call, METH_VARARGS,
     "saved_call(compress, function, args, kwargs, /)\n--\n\nSee gradckpt.compress_saved()."},
    {"rounding_state", rounding_state, METH_NOARGS, "rounding_state()\n--\n\nSee gradckpt.config.get_rounding_state()."},
    {"set_rounding_state", set_rounding_state, METH_VARARGS,
     "set_rounding_state(step, tensor, /)\n--\n\nSee gradckpt.config.set_rounding_state()."},
    {"observe_regions", observe_regions, METH_O,
     "observe_regions(observer, /)\n--\n\nFor gradckpt._memory: observer(frame) for each region that has kept its "
     "arguments; None: no more."},
    {"late_verdicts", gck_late_verdicts, METH_O,
     "late_verdicts(seconds, /)\n--\n\nFor tests: CPU codecs say as late as a device whether they can hold the values, "
     "and a forward that is far ahead waits so long for them. 0: no more."},
    {"settle_verdicts", gck_settle_verdicts, METH_NOARGS, "settle_verdicts()\n--\n\nFor tests: the late verdicts come."},
    {"make_names", gck_make_names, METH_VARARGS,
     "make_names(rows, wanted, /)\n--\n\nOperators by name: rows of (operator, keep, compress, every, phase, group, form)."},
    {"make_store", gck_make_store, METH_VARARGS, "make_store(names, mutation, reusable, /)\n--\n\nAn empty Store for one region."},
    {"selective_name", gck_selective_name, METH_VARARGS, "selective_name(x, name, modes, /)\n--\n\nSee gradckpt.policies.name()."},
    {"catcher", gck_catcher, METH_O, "catcher(operator, /)\n--\n\nThe kernel that catches it."},
    {"selective_key", gck_selective_key, METH_NOARGS, "selective_key()\n--\n\nThe dispatch key that catchers are registered at, or None."},
    {"catch_by_mode", gck_catch_by_mode, METH_O, "catch_by_mode(on, /)\n--\n\nFor tests: no operator is caught on the dispatch key."},
    {"stand_in", gck_stand_in_py, METH_O,
     "stand_in(by, /)\n--\n\nOne more (1) or one less (-1) needs gradckpt's checkpoint in the place of torch's."},
    {"decides", gck_decides_py, METH_NOARGS,
     "decides()\n--\n\nTrue while the calling thread runs a region that keeps decisions."},
    {"stats", stats, METH_NOARGS, "stats()\n--\n\nRaw counters; see gradckpt.stats()."},
    {"reset_stats", reset_stats, METH_NOARGS, "reset_stats()\n--\n\nAll counters to zero, except what is alive."},
    {NULL, NULL, 0, NULL},
};

/* `%s` of torch's version, for messages; "an unknown version" when it has none. */
static void raise_missing(const char *missing)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *version = torch ? PyObject_GetAttrString(torch, "__version__") : NULL;

    PyErr_Clear();
    PyErr_Format(PyExc_ImportError, "gradckpt needs torch >= 2.10, and torch %S does not have %s",
                 version ? version : Py_None, missing);
    Py_XDECREF(torch);
    Py_XDECREF(version);
}

/* libtorch's symbols and operators.  0 or -1 with ImportError. */
static int load_torch(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *file = torch ? PyObject_GetAttrString(torch, "__file__") : NULL;
    PyObject *path = file != NULL && PyUnicode_Check(file) ? PyUnicode_EncodeFSDefault(file) : NULL;
    char lib[4096] = "";
    const char *missing;

    if (torch == NULL && PyErr_ExceptionMatches(PyExc_ModuleNotFoundError)) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ImportError, "gradckpt needs torch >= 2.10, which is not installed: pip install torch");
    } else if (torch != NULL && file == NULL) {
        gck_clear_attribute_error();
    }
    if (path != NULL && (size_t)PyBytes_Size(path) + 8 < sizeof lib) {
        strcpy(lib, PyBytes_AsString(path));     /* .../torch/__init__.py -> .../torch/lib */
        char *slash = strrchr(lib, '/');
        strcpy(slash != NULL ? slash : lib, "/lib");
    }
    Py_XDECREF(torch);
    Py_XDECREF(file);
    Py_XDECREF(path);
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
        PyErr_Format(PyExc_ImportError, "gradckpt: torch refused %s", missing);
        return -1;
    }
    return 0;
}

static int choose_isa(void)
{
    const char *forced = secure_getenv("GRADCKPT_ISA");

    if (forced == NULL || forced[0] == '\0' || gck_isa_force(forced) == 0) {
        return 0;
    }
    PyErr_Format(PyExc_ImportError, "gradckpt: GRADCKPT_ISA=%s is %s; there are scalar, avx2 and avx512", forced,
                 gck_isa_supported(forced) < 0 ? "not known" : "not supported by this CPU");
    return -1;
}

static int intern_option_names(gck_state *state)
{
#define OPTION(name)                                                                           \
    if ((state->option_names.name = PyUnicode_InternFromString(#name)) == NULL) {              \
        return -1;                                                                             \
    }
    OPTION(function)
    GCK_OPTIONS(OPTION)
#undef OPTION
    return 0;
}

/* gradckpt.compat.checkpoint: a builtin of that name and module, for repr and pickle. */
static PyMethodDef compat_def = {"checkpoint", (PyCFunction)(void (*)(void))gck_compat_checkpoint,
                                 METH_FASTCALL | METH_KEYWORDS, gck_compat_checkpoint_doc};

static int add_compat(PyObject *module)
{
    PyObject *name = PyUnicode_FromString("gradckpt.compat");
    PyObject *function = name != NULL ? PyCFunction_NewEx(&compat_def, module, name) : NULL;
    const int status = function == NULL ? -1 : PyModule_AddObjectRef(module, "compat_checkpoint", function);

    Py_XDECREF(name);
    Py_XDECREF(function);
    return status;
}

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
}

static int module_exec(PyObject *module)
{
    gck_state *state = gck_state_of(module);

    state->last_step = state->watched_task = -1;
    if (choose_isa() < 0 || load_torch() < 0 || gck_py_load(&state->py) < 0 || intern_option_names(state) < 0) {
        return -1;
    }
    if ((state->Payload = add_type(module, &gck_payload_spec)) == NULL
        || (state->Frame = add_type(module, &gck_frame_spec)) == NULL
        || (state->Holder = add_type(module, &gck_holder_spec)) == NULL
        || (state->Recompute = add_type(module, &gck_recompute_spec)) == NULL
        || (state->Names = add_type(module, &gck_names_spec)) == NULL
        || (state->Store = add_type(module, &gck_store_spec)) == NULL
        || (state->Kept = add_type(module, &gck_kept_spec)) == NULL
        || (state->Context = add_type(module, &gck_context_spec)) == NULL
        || (state->Saver = add_type(module, &gck_saver_spec)) == NULL
        || (state->Saved = add_type(module, &gck_saved_spec)) == NULL
        || (state->stateless = PyDict_New()) == NULL
        || (state->closed = PyDict_New()) == NULL
        || gck_node_classes(module, state) < 0
        || PyModule_AddObjectRef(module, "SelectiveRecompute", state->SelectiveRecompute) < 0) {
        return -1;
    }
    return add_compat(module) < 0 || PyModule_AddType(module, state->Context) < 0 ? -1 : PyModule_AddType(module, state->Payload);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    gck_state *state = gck_state_of(module);

    Py_VISIT(state->Payload);
    Py_VISIT(state->CheckpointFunction);
    Py_VISIT(state->SelectiveRecompute);
    Py_VISIT(state->selective_apply);
    Py_VISIT(state->stateless);
    Py_VISIT(state->decisions[0]);
    Py_VISIT(state->decisions[1]);
    Py_VISIT(state->torchs);
    Py_VISIT(state->observer);
    Py_VISIT(state->closed);
    Py_VISIT(state->Frame);
    Py_VISIT(state->Holder);
    Py_VISIT(state->Recompute);
    Py_VISIT(state->Names);
    Py_VISIT(state->Store);
    Py_VISIT(state->Context);
    Py_VISIT(state->Kept);
    Py_VISIT(state->Saver);
    Py_VISIT(state->Saved);
    for (int i = 0; i < GCK_NPLANS; i++) {
        Py_VISIT(state->plans[i].key);
    }
    return gck_py_traverse(&state->py, visit, arg);
}

static int module_clear(PyObject *module)
{
    gck_state *state = gck_state_of(module);

    Py_CLEAR(state->Payload);
    Py_CLEAR(state->CheckpointFunction);
    Py_CLEAR(state->SelectiveRecompute);
    Py_CLEAR(state->selective_apply);
    Py_CLEAR(state->stateless);
    Py_CLEAR(state->decisions[0]);
    Py_CLEAR(state->decisions[1]);
    Py_CLEAR(state->torchs);
    Py_CLEAR(state->observer);
    Py_CLEAR(state->closed);
#define OPTION(name) Py_CLEAR(state->option_names.name);
    OPTION(function)
    GCK_OPTIONS(OPTION)
#undef OPTION
    Py_CLEAR(state->Frame);
    Py_CLEAR(state->Holder);
    Py_CLEAR(state->Recompute);
    Py_CLEAR(state->Names);
    Py_CLEAR(state->Store);
    Py_CLEAR(state->Context);
    Py_CLEAR(state->Kept);
    Py_CLEAR(state->Saver);
    Py_CLEAR(state->Saved);
    for (int i = 0; i < GCK_NPLANS; i++) {
        Py_CLEAR(state->plans[i].key);
    }
    gck_py_clear(&state->py);
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
