/* saved_functions.c: the table of autograd Functions of libraries, which save what several operators would.
 *
 * The facts were read in the libraries' sources (docs/saved.md names the versions): what a Function passes to
 * save_for_backward(), in order, and how its backward reads it.  A Function is known by its name, the package that
 * defines it and the number of its saved tensors, because names repeat and lists change between versions: what does
 * not match stays exact.  Some overwrite what they have saved, so each use of a payload gets values of its own. */
#include "engine/saved/saved_functions.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "engine/payload/packed.h"

#include <string.h>

/* At this place: a factor of a product of values; values that are summed in products of matrices; the argument of an
 * activation; what a norm normalizes; the same where the Function's result is a product of matrices. */
#define FACTOR(node, place) {node, place, GCK_ROLE_FACTOR, GCK_PRODUCT}
#define LINEAR(node, place) {node, place, GCK_ROLE_VALUES, GCK_LINEAR}
#define ACTIVATION(node, place) {node, place, GCK_ROLE_VALUES, GCK_ACTIVATION}
#define NORMED(node, place) {node, place, GCK_ROLE_ROWS, GCK_NORM}
#define NORMED_LINEAR(node, place) {node, place, GCK_ROLE_ROWS, GCK_LINEAR}

/* A Function that is no sum: its rows; one with rows that also hold for its results; one that stays exact. */
#define KNOWN(package, node, n, ...) {package, node, n, 0, NULL, 0, {__VA_ARGS__}}
#define KNOWN_RESULT(package, node, n, ...) {package, node, n, 0, NULL, 1, {__VA_ARGS__}}
#define EXACT(package, node, kind, why) {package, node, 0, kind, why, 0, {{NULL, NULL, 0, 0}}}

#define GATED(package, node) KNOWN(package, node, 2, FACTOR(node, "0"), FACTOR(node, "1"))
#define NORM(package, node, n) KNOWN(package, node, n, NORMED(node, "0"))
#define FIRST(package, node, n) KNOWN(package, node, n, LINEAR(node, "0"))

static const char logits[] = "logits, of which the backward takes exponentials";
static const char gradient[] = "a gradient, made in the forward";
static const char probabilities[] = "probabilities, which have to sum to 1";
static const char tables[] = "tables or indices";
static const char attention[] = "the result and log-sum-exp of attention, which fit only exact queries and keys";

/* Functions with one name follow each other. */
static const gck_function functions[] = {
    GATED("liger_kernel", "LigerSiLUMulFunctionBackward"),
    GATED("liger_kernel", "LigerGELUMulFunctionBackward"),
    KNOWN("liger_kernel", "LigerFusedGateUpSiLUMulFunctionBackward", 1,
          FACTOR("LigerFusedGateUpSiLUMulFunctionBackward", "0")),
    KNOWN("liger_kernel", "LigerReLUSquaredFunctionBackward", 1, FACTOR("LigerReLUSquaredFunctionBackward", "0")),
    NORM("liger_kernel", "LigerRMSNormFunctionBackward", 3),
    NORM("liger_kernel", "LigerRMSNormFunctionBackward", 2),
    KNOWN_RESULT("liger_kernel", "LigerFusedAddRMSNormFunctionBackward", 3,
                 NORMED("LigerFusedAddRMSNormFunctionBackward", "0")),
    NORM("liger_kernel", "LigerLayerNormFunctionBackward", 5),
    KNOWN("liger_kernel", "LigerMLPFunctionBackward", 5,
          LINEAR("LigerMLPFunctionBackward", "0"), LINEAR("LigerMLPFunctionBackward", "4")),
    EXACT("liger_kernel", "LigerPolyNormFunctionBackward", GCK_NODE_PEAK, "values that are raised to the 5th power"),
    EXACT("liger_kernel", "LigerRopeFunctionBackward", GCK_NODE_PLAIN, tables),
    EXACT("liger_kernel", "LigerQwen2VLMRopeFunctionBackward", GCK_NODE_PLAIN, tables),
    EXACT("liger_kernel", "LigerLlama4RopeFunctionBackward", GCK_NODE_PLAIN, tables),
    EXACT("liger_kernel", "LigerCrossEntropyFunctionBackward", GCK_NODE_MIX, gradient),
    EXACT("liger_kernel", "LigerFusedLinearCrossEntropyFunctionBackward", GCK_NODE_MIX, gradient),
    EXACT("liger_kernel", "LigerFusedLinearJSDFunctionBackward", GCK_NODE_PEAK, gradient),
    EXACT("liger_kernel", "LigerJSDFunctionBackward", GCK_NODE_PEAK, gradient),
    EXACT("liger_kernel", "LigerTVDLossFunctionBackward", GCK_NODE_PEAK, gradient),
    EXACT("liger_kernel", "LigerKLDivLossFunctionBackward", GCK_NODE_PEAK, probabilities),
    EXACT("liger_kernel", "LigerSoftmaxFunctionBackward", GCK_NODE_MIX, probabilities),
    EXACT("liger_kernel", "LigerSparsemaxFunctionBackward", GCK_NODE_MIX, probabilities),
    EXACT("liger_kernel", "LigerMultiTokenAttentionFunctionBackward", GCK_NODE_MIX, probabilities),
    EXACT("liger_kernel", "LigerFusedNeighborhoodAttentionFunctionBackward", GCK_NODE_MIX, probabilities),
    EXACT("liger_kernel", "GrpoLossFunctionBackward", GCK_NODE_PEAK, logits),

    KNOWN("unsloth", "LoRA_MLPBackward", 9, LINEAR("LoRA_MLPBackward", "6"), LINEAR("LoRA_MLPBackward", "7"),
          LINEAR("LoRA_MLPBackward", "8")),
    FIRST("unsloth", "LoRA_QKVBackward", 7),
    KNOWN("unsloth", "LoRA_WBackward", 3, LINEAR("LoRA_WBackward", "2")),
    NORM("unsloth", "Fast_RMS_LayernormBackward", 3),
    NORM("unsloth", "Fast_LayernormBackward", 5),
    FIRST("unsloth", "GroupedGemmBackward", 4),
    EXACT("unsloth", "Fast_CrossEntropyLossBackward", GCK_NODE_MIX, logits),
    EXACT("unsloth", "Slow_RoPE_EmbeddingBackward", GCK_NODE_PLAIN, tables),
    EXACT("unsloth_zoo", "UnslothFusedLossBackward", GCK_NODE_MIX, gradient),
    EXACT("unsloth_zoo", "UnslothEfficientGRPOBackward", GCK_NODE_PEAK, gradient),
    EXACT("unsloth_zoo", "_ManualGroupedMMBackward", GCK_NODE_MIX, "an input that the backward compares bit by bit"),
    EXACT("unsloth_zoo", "_MoEGateGradIdentityBackward", GCK_NODE_PEAK, "a gate, by which the backward divides"),

    GATED("flash_attn", "SwiGLUFunctionBackward"),
    KNOWN("flash_attn", "GeLUFunctionBackward", 2, ACTIVATION("GeLUFunctionBackward", "0")),
    KNOWN("flash_attn", "FastGeLUFunctionBackward", 1, ACTIVATION("FastGeLUFunctionBackward", "0")),
    KNOWN_RESULT("flash_attn", "LayerNormFnBackward", 9, NORMED("LayerNormFnBackward", "0")),
    KNOWN_RESULT("flash_attn", "LayerNormLinearFnBackward", 6, NORMED_LINEAR("LayerNormLinearFnBackward", "0")),
    KNOWN_RESULT("flash_attn", "DropoutAddLayerNormFnBackward", 8, NORMED("DropoutAddLayerNormFnBackward", "0")),
    KNOWN("flash_attn", "FusedMLPFuncBackward", 5, LINEAR("FusedMLPFuncBackward", "0"),
          LINEAR("FusedMLPFuncBackward", "3"), LINEAR("FusedMLPFuncBackward", "4")),
    KNOWN("flash_attn", "FusedMLPFuncBackward", 4, LINEAR("FusedMLPFuncBackward", "0"),
          LINEAR("FusedMLPFuncBackward", "3")),
    FIRST("flash_attn", "FusedDenseFuncBackward", 2),
    FIRST("apex", "FusedDenseFuncBackward", 2),
    EXACT("flash_attn", "CrossEntropyLossBackward", GCK_NODE_MIX, logits),
    EXACT("flash_attn", "FlashAttnFuncBackward", GCK_NODE_MIX, attention),
    EXACT("flash_attn_interface", "FlashAttnFuncBackward", GCK_NODE_MIX, attention),
    EXACT("flash_attn", "FlashAttnVarlenFuncBackward", GCK_NODE_MIX, attention),
    EXACT("flash_attn_interface", "FlashAttnVarlenFuncBackward", GCK_NODE_MIX, attention),
    EXACT("flash_attn", "FlashAttnQKVPackedFuncBackward", GCK_NODE_MIX, attention),
    EXACT("flash_attn_interface", "FlashAttnQKVPackedFuncBackward", GCK_NODE_MIX, attention),
    EXACT("flash_attn", "FlashAttnKVPackedFuncBackward", GCK_NODE_MIX, attention),
    EXACT("flash_attn", "FlashAttnVarlenQKVPackedFuncBackward", GCK_NODE_MIX, attention),
    EXACT("flash_attn", "FlashAttnVarlenKVPackedFuncBackward", GCK_NODE_MIX, attention),
    EXACT("flash_attn", "ApplyRotaryEmbBackward", GCK_NODE_PLAIN, tables),
    EXACT("flash_attn", "ApplyRotaryEmbQKV_Backward", GCK_NODE_PLAIN, tables),
    EXACT("flash_attn", "ApplyRotaryEmbKV_Backward", GCK_NODE_PLAIN, tables),

    FIRST("transformer_engine", "_LinearBackward", 4),
    KNOWN("transformer_engine", "_LayerNormLinearBackward", 8, NORMED_LINEAR("_LayerNormLinearBackward", "0"),
          LINEAR("_LayerNormLinearBackward", "5")),
    KNOWN("transformer_engine", "_LayerNormMLPBackward", 14, NORMED_LINEAR("_LayerNormMLPBackward", "0"),
          LINEAR("_LayerNormMLPBackward", "2"), LINEAR("_LayerNormMLPBackward", "6"),
          LINEAR("_LayerNormMLPBackward", "7"), LINEAR("_LayerNormMLPBackward", "8")),
    EXACT("transformer_engine", "FusedAttnFuncBackward", GCK_NODE_MIX, attention),
    EXACT("transformer_engine", "CrossEntropyFunctionBackward", GCK_NODE_MIX, gradient),
    EXACT("transformer_engine", "FusedRoPEFuncBackward", GCK_NODE_PLAIN, tables),
    EXACT("transformer_engine", "FusedQKVRoPEFuncBackward", GCK_NODE_PLAIN, tables),

    EXACT("xformers", "_fMHABackward", GCK_NODE_MIX, attention),
    EXACT("mslk", "_fMHABackward", GCK_NODE_MIX, attention),
    KNOWN("xformers", "_SwiGLUDecomposedFuncBackward", 12, LINEAR("_SwiGLUDecomposedFuncBackward", "0"),
          LINEAR("_SwiGLUDecomposedFuncBackward", "7"), LINEAR("_SwiGLUDecomposedFuncBackward", "8"),
          LINEAR("_SwiGLUDecomposedFuncBackward", "9"), LINEAR("_SwiGLUDecomposedFuncBackward", "10")),

    /* with memory_efficient=True these save their results, which have no row */
    NORM("apex", "FusedLayerNormAffineFunctionBackward", 5),
    NORM("apex", "FusedLayerNormAffineMixedDtypesFunctionBackward", 5),
    NORM("apex", "FusedLayerNormFunctionBackward", 3),
    NORM("apex", "FusedRMSNormAffineFunctionBackward", 3),
    NORM("apex", "FusedRMSNormAffineMixedDtypesFunctionBackward", 3),
    NORM("apex", "FusedRMSNormFunctionBackward", 2),
    NORM("torch", "GeneratedBackwardFor_apex_fused_layer_norm_affine_fwd_defaultBackward", 5),
    NORM("torch", "GeneratedBackwardFor_apex_fused_layer_norm_fwd_defaultBackward", 3),
    NORM("torch", "GeneratedBackwardFor_apex_fused_rms_norm_affine_fwd_defaultBackward", 3),
    NORM("torch", "GeneratedBackwardFor_apex_fused_rms_norm_fwd_defaultBackward", 2),
    FIRST("apex", "DenseNoBiasFuncBackward", 2),
    KNOWN("apex", "FusedDenseGeluDenseFuncBackward", 5, LINEAR("FusedDenseGeluDenseFuncBackward", "0"),
          LINEAR("FusedDenseGeluDenseFuncBackward", "3"), LINEAR("FusedDenseGeluDenseFuncBackward", "4")),
    EXACT("apex", "SoftmaxCrossEntropyLossBackward", GCK_NODE_MIX, logits),
    EXACT("apex", "FocalLossBackward", GCK_NODE_PEAK, gradient),
    EXACT("apex", "ScaledUpperTriangMaskedSoftmaxBackward", GCK_NODE_MIX, probabilities),
    EXACT("apex", "ScaledMaskedSoftmaxBackward", GCK_NODE_MIX, probabilities),
    EXACT("apex", "ScaledSoftmaxBackward", GCK_NODE_MIX, probabilities),
};

enum { NFUNCTIONS = (int)(sizeof functions / sizeof functions[0]) };

const gck_function *gck_function_at(int index) { return index < NFUNCTIONS ? &functions[index] : NULL; }

/* ---- nodes ---- */

/* torch's own nodes have static types. */
int gck_is_function(PyObject *node) { return (PyType_GetFlags(Py_TYPE(node)) & Py_TPFLAGS_HEAPTYPE) != 0; }

/* 1 when the module's name, which is no str if it has none, lies in the package. */
static int is_within(PyObject *module, const char *package)
{
    const size_t length = strlen(package);
    const char *name = PyUnicode_Check(module) ? PyUnicode_AsUTF8AndSize(module, NULL) : "";

    return name == NULL ? -1 : strncmp(name, package, length) == 0 && (name[length] == '.' || name[length] == '\0');
}

/* New reference: the name of the module that defines the node's Function. */
static PyObject *module_of(const gck_py *py, PyObject *node)
{
    GCK_SCOPED PyObject *type = PyObject_GetAttr(node, py->names._forward_cls);
    return type != NULL ? PyObject_GetAttr(type, py->names.__module__) : NULL;
}

int gck_function_of(const gck_py *py, PyObject *node, int first)
{
    GCK_SCOPED PyObject *module = module_of(py, node);
    GCK_SCOPED PyObject *saved = module != NULL ? PyObject_GetAttr(node, py->names._raw_saved_tensors) : NULL;
    const Py_ssize_t n = saved != NULL ? PyTuple_Size(saved) : -1;
    int found = -1;

    Py_CLEAR(saved);
    if (n < 0) {                                 /* no Function after all, or a backward has freed it */
        return gck_clear_refusal() < 0 ? -2 : -1;
    }
    for (int i = first; found == -1 && i < NFUNCTIONS && strcmp(functions[i].node, functions[first].node) == 0; i++) {
        const int within = is_within(module, functions[i].package);
        found = within < 0 ? -2 : within && (functions[i].nsaved == 0 || functions[i].nsaved == n) ? i : -1;
    }
    return found;
}

/* 1 when the Function is one of torch's or ours, which users do not choose codecs for; 0; -1.  torch defines those of
 * users' custom operators. */
static int is_internal(const gck_py *py, PyObject *node)
{
    GCK_SCOPED PyObject *module = module_of(py, node);
    int internal = module == NULL ? gck_clear_refusal() : 0;

    for (int i = 0; module != NULL && internal == 0 && i < 2; i++) {
        internal = is_within(module, i == 0 ? "gradckpt" : "torch");
    }
    if (internal > 0 && is_within(module, "torch._library") > 0) {
        internal = 0;
    }
    return internal;
}

int gck_count_unknown_function(gck_state *state, PyObject *node, PyObject *x)
{
    const int internal = is_internal(&state->py, node);
    GCK_SCOPED PyObject *name = internal == 0 ? PyType_GetName(Py_TYPE(node)) : NULL, *known = NULL, *next = NULL;
    long long tensors = 0, bytes = 0;
    int64_t own = 0;

    if (internal != 0) {
        return internal < 0 ? -1 : 0;
    }
    if (name == NULL || (state->unknown_functions == NULL && (state->unknown_functions = PyDict_New()) == NULL)
        || gck_count_bytes(&state->py, x, &own) < 0) {
        return -1;
    }
    known = Py_XNewRef(PyDict_GetItemWithError(state->unknown_functions, name));
    if (PyErr_Occurred() || (known != NULL && !PyArg_ParseTuple(known, "LL", &tensors, &bytes))) {
        return -1;
    }
    next = Py_BuildValue("(LL)", tensors + 1, bytes + (long long)own);
    return next == NULL ? -1 : PyDict_SetItem(state->unknown_functions, name, next);
}

/* ---- for Python ---- */

PyObject *gck_saved_functions(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);

    for (int i = 0; list != NULL && i < NFUNCTIONS; i++) {
        const gck_function *function = &functions[i];
        PyObject *places = PyList_New(0);
        for (int r = 0; places != NULL && function->rows[r].node != NULL; r++) {
            gck_add_item(&places, PyUnicode_FromString(function->rows[r].argument));
        }
        gck_add_item(&list, places == NULL ? NULL
                          : Py_BuildValue("(ssNz)", function->package, function->node, gck_as_tuple(places),
                                          function->exact));
    }
    return list;
}
