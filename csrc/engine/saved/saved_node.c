/* saved_node.c: the table of the nodes whose saved tensors a lossy codec may encode. */
#include "engine/saved/saved_node.h"

#include "torch/calls.h"

#include <string.h>

/* By torch's names: the node that saves a tensor, and its attribute _raw_saved_<argument>.  The rows
 * of a node follow each other. */
static const gck_saved_row rows[] = {
    /* products: the gradient is linear in the saved tensor */
    {"AddmmBackward0", "mat1", GCK_ROLE_VALUES, GCK_LINEAR},
    {"AddmmBackward0", "mat2", GCK_ROLE_VALUES, GCK_LINEAR},
    {"MmBackward0", "self", GCK_ROLE_VALUES, GCK_LINEAR},
    {"MmBackward0", "mat2", GCK_ROLE_VALUES, GCK_LINEAR},
    {"MvBackward0", "self", GCK_ROLE_VALUES, GCK_LINEAR},
    {"AddmvBackward0", "mat", GCK_ROLE_VALUES, GCK_LINEAR},
    {"LinearBackward0", "input", GCK_ROLE_VALUES, GCK_LINEAR},
    {"LinearBackward0", "weight", GCK_ROLE_VALUES, GCK_LINEAR},
    {"MkldnnLinearBackward0", "self", GCK_ROLE_VALUES, GCK_LINEAR},
    {"MkldnnLinearBackward0", "weight", GCK_ROLE_VALUES, GCK_LINEAR},
    {"BmmBackward0", "self", GCK_ROLE_VALUES, GCK_MATMUL},
    {"BmmBackward0", "mat2", GCK_ROLE_VALUES, GCK_MATMUL},
    {"BaddbmmBackward0", "batch1", GCK_ROLE_VALUES, GCK_MATMUL},
    {"BaddbmmBackward0", "batch2", GCK_ROLE_VALUES, GCK_MATMUL},
    {"AddbmmBackward0", "batch1", GCK_ROLE_VALUES, GCK_MATMUL},
    {"AddbmmBackward0", "batch2", GCK_ROLE_VALUES, GCK_MATMUL},
    {"TrilinearBackward0", "i1", GCK_ROLE_VALUES, GCK_MATMUL},
    {"TrilinearBackward0", "i2", GCK_ROLE_VALUES, GCK_MATMUL},
    {"TrilinearBackward0", "i3", GCK_ROLE_VALUES, GCK_MATMUL},
    {"GroupedMmBackward0", "self", GCK_ROLE_VALUES, GCK_MATMUL},
    {"GroupedMmBackward0", "mat2", GCK_ROLE_VALUES, GCK_MATMUL},
    {"ConvolutionBackward0", "input", GCK_ROLE_VALUES, GCK_CONVOLUTION},
    {"ConvolutionBackward0", "weight", GCK_ROLE_VALUES, GCK_CONVOLUTION},
    {"ConvolutionOverrideableBackward0", "input", GCK_ROLE_VALUES, GCK_CONVOLUTION},
    {"ConvolutionOverrideableBackward0", "weight", GCK_ROLE_VALUES, GCK_CONVOLUTION},
    {"MulBackward0", "self", GCK_ROLE_FACTOR, GCK_PRODUCT},
    {"MulBackward0", "other", GCK_ROLE_FACTOR, GCK_PRODUCT},
    {"AddcmulBackward0", "tensor1", GCK_ROLE_FACTOR, GCK_PRODUCT},
    {"AddcmulBackward0", "tensor2", GCK_ROLE_FACTOR, GCK_PRODUCT},
    {"PowBackward0", "self", GCK_ROLE_POWER, GCK_PRODUCT},
    /* attention: its result and its log-sum-exp are made again from the others */
    {"ScaledDotProductFlashAttentionForCpuBackward0", "query", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductFlashAttentionForCpuBackward0", "key", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductFlashAttentionForCpuBackward0", "value", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductFlashAttentionForCpuBackward0", "output", GCK_ROLE_AGAIN, GCK_ATTENTION},
    {"ScaledDotProductFlashAttentionForCpuBackward0", "logsumexp", GCK_ROLE_AGAIN, GCK_ATTENTION},
    {"ScaledDotProductFlashAttentionBackward0", "query", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductFlashAttentionBackward0", "key", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductFlashAttentionBackward0", "value", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductFlashAttentionBackward0", "output", GCK_ROLE_AGAIN, GCK_ATTENTION},
    {"ScaledDotProductFlashAttentionBackward0", "logsumexp", GCK_ROLE_AGAIN, GCK_ATTENTION},
    {"ScaledDotProductEfficientAttentionBackward0", "query", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductEfficientAttentionBackward0", "key", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductEfficientAttentionBackward0", "value", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductEfficientAttentionBackward0", "output", GCK_ROLE_AGAIN, GCK_ATTENTION},
    {"ScaledDotProductEfficientAttentionBackward0", "log_sumexp", GCK_ROLE_AGAIN, GCK_ATTENTION},
    {"ScaledDotProductCudnnAttentionBackward0", "query", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductCudnnAttentionBackward0", "key", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductCudnnAttentionBackward0", "value", GCK_ROLE_ATTENTION, GCK_ATTENTION},
    {"ScaledDotProductCudnnAttentionBackward0", "output", GCK_ROLE_AGAIN, GCK_ATTENTION},
    {"ScaledDotProductCudnnAttentionBackward0", "logsumexp", GCK_ROLE_AGAIN, GCK_ATTENTION},
    /* norms: their means and scales are exact */
    {"NativeLayerNormBackward0", "input", GCK_ROLE_ROWS, GCK_NORM},
    {"NativeGroupNormBackward0", "input", GCK_ROLE_ROWS, GCK_NORM},
    {"NativeBatchNormBackward0", "input", GCK_ROLE_PLANES, GCK_NORM},
    {"CudnnBatchNormBackward0", "input", GCK_ROLE_PLANES, GCK_NORM},
    {"MiopenBatchNormBackward0", "input", GCK_ROLE_PLANES, GCK_NORM},
    {"BatchNormWithUpdateBackward0", "input", GCK_ROLE_PLANES, GCK_NORM},
    {"NativeBatchNormLegitBackward0", "input", GCK_ROLE_PLANES, GCK_NORM},
    {"FusedRmsNormBackward0", "input", GCK_ROLE_ROWS, GCK_NORM},
    {"MkldnnRnnLayerBackward0", "input", GCK_ROLE_VALUES, GCK_RNN},
    {"MkldnnRnnLayerBackward0", "hx_", GCK_ROLE_VALUES, GCK_RNN},
    {"MkldnnRnnLayerBackward0", "cx_", GCK_ROLE_VALUES, GCK_RNN},
    {"MkldnnRnnLayerBackward0", "result0", GCK_ROLE_VALUES, GCK_RNN},
    {"CudnnRnnBackward0", "input", GCK_ROLE_VALUES, GCK_RNN},
    /* activations whose derivative is continuous, and constant beyond 20 */
    {"SiluBackward0", "self", GCK_ROLE_CUT, GCK_ACTIVATION},
    {"GeluBackward0", "self", GCK_ROLE_CUT, GCK_ACTIVATION},
    {"MishBackward0", "self", GCK_ROLE_CUT, GCK_ACTIVATION},
    {"SoftplusBackward0", "self", GCK_ROLE_CUT_OF_ONE, GCK_ACTIVATION},
    {"EluBackward0", "self", GCK_ROLE_CUT_OF_ONE, GCK_ACTIVATION},
    {"LogSigmoidBackward0", "self", GCK_ROLE_CUT, GCK_ACTIVATION},
    /* activations whose backward reads only a sign; masks of x <= 0 and of x > 0 differ for NaN, and
     * so do these */
    {"ReluBackward0", "result", GCK_ROLE_POSITIVE_OR_NAN, GCK_SIGN},
    {"LeakyReluBackward0", "self", GCK_ROLE_POSITIVE, GCK_SIGN},
    {"LeakyReluBackward1", "result", GCK_ROLE_POSITIVE, GCK_SIGN},
    /* probabilities: later operators may divide by them, so the relative error has to be small;
     * backward takes the exponential of their logarithms, so there the absolute error has to be small */
    {"SoftmaxBackward0", "result", GCK_ROLE_PROBABILITIES, GCK_SOFTMAX},
    {"SafeSoftmaxBackward0", "result", GCK_ROLE_PROBABILITIES, GCK_SOFTMAX},
    {"LogSoftmaxBackward0", "result", GCK_ROLE_ROUNDED, GCK_LOG_SOFTMAX},
    {"NllLossBackward0", "self", GCK_ROLE_ROUNDED, GCK_LOG_SOFTMAX},
    {"NllLoss2DBackward0", "self", GCK_ROLE_ROUNDED, GCK_LOG_SOFTMAX},
    /* only the shape of these is read */
    {"MaxPool2DWithIndicesBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"MaxPool3DWithIndicesBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"AdaptiveMaxPool2DBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"AvgPool2DBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"AvgPool3DBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"AdaptiveAvgPool2DBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"AdaptiveAvgPool3DBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"ReflectionPad1DBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"ReflectionPad2DBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"ReplicationPad1DBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
    {"ReplicationPad2DBackward0", "self", GCK_ROLE_VALUES, GCK_POOLING},
};

enum { NROWS = (int)(sizeof rows / sizeof rows[0]) };

/* Nodes that pass values on unchanged, at another place or in another dtype. */
static const char *const views[] = {
    "AliasBackward0", "AsStridedBackward0", "CloneBackward0", "DiagonalBackward0", "ExpandBackward0",
    "PermuteBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0",
    "SplitWithSizesBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "TBackward0",
    "ToCopyBackward0", "TransposeBackward0", "UnbindBackward0", "UnfoldBackward0", "UnsafeViewBackward0",
    "UnsqueezeBackward0", "ViewBackward0",
};

/* Nodes whose every value comes from a few values, at whatever place, by derivatives that have a bound. */
static const char *const plain[] = {
    "AbsBackward0", "AddBackward0", "AddBackward1", "AddrBackward0", "AmaxBackward0", "AminBackward0",
    "AminmaxBackward0", "CatBackward0", "CeilBackward0", "Col2ImBackward0", "ComplexBackward0", "ConjBackward0",
    "ConjPhysicalBackward0", "ConstantPadNdBackward0", "CopyBackwards", "CopysignBackward0",
    "CopysignBackward1", "CosBackward0", "CoshBackward0", "CummaxBackward0", "CumminBackward0",
    "CumprodBackward0", "CumsumBackward0", "Deg2RadBackward0", "DiagEmbedBackward0", "DiagonalScatterBackward0",
    "DivBackward1", "DivBackward3", "FlipBackward0", "FloorBackward0", "FmaxBackward0", "FminBackward0",
    "FmodBackward0", "FusedDropoutBackward0", "GatherBackward0", "GluBackward0", "GridSampler2DBackward0",
    "GridSampler3DBackward0", "HardshrinkBackward0", "HardswishBackward0", "HuberLossBackward0",
    "HypotBackward0", "Im2ColBackward0", "IndexAddBackward0", "IndexBackward0", "IndexCopyBackward0",
    "IndexFillBackward0", "IndexPutBackward0", "IndexPutImplBackward0", "IndexSelectBackward0",
    "KthvalueBackward0", "LerpBackward0", "LerpBackward1", "LiftFreshBackward0", "LinalgCrossBackward0",
    "MaskedFillBackward0", "MaskedFillBackward1", "MaskedScatterBackward0", "MaskedSelectBackward0",
    "MaxBackward0", "MaxBackward1", "MaxUnpool2DBackward0", "MaximumBackward0", "MedianBackward0",
    "MedianBackward1", "MinBackward0", "MinBackward1", "MinimumBackward0", "ModeBackward0", "MseLossBackward0",
    "MulBackward1", "NanToNumBackward0", "NanmedianBackward0", "NarrowCopyBackward0", "NativeDropoutBackward0",
    "NegBackward0", "PixelShuffleBackward0", "PixelUnshuffleBackward0", "PreluKernelBackward0", "ProdBackward0",
    "ProdBackward1", "PutBackward0", "Rad2DegBackward0", "ReflectionPad3DBackward0", "RemainderBackward0",
    "RepeatBackward0", "ReplicationPad3DBackward0", "RollBackward0", "Rot90Backward0", "RoundBackward0",
    "RreluWithNoiseBackward0", "RsubBackward0", "RsubBackward1", "ScatterAddBackward0", "ScatterBackward0",
    "ScatterBackward1", "SelectScatterBackward0", "SignBackward0", "SinBackward0", "SinhBackward0",
    "SliceScatterBackward0", "SmoothL1LossBackward0", "SoftshrinkBackward0", "SortBackward0", "SortBackward1",
    "StackBackward0", "SubBackward0", "SubBackward1", "TakeBackward0", "ThresholdBackward0", "TopkBackward0",
    "TrilBackward0", "TriuBackward0", "TruncBackward0", "UnsafeIndexBackward0", "UnsafeSplitBackward0",
    "UnsafeSplitWithSizesBackward0", "UpsampleBicubic2DAaBackward0", "UpsampleBicubic2DBackward0",
    "UpsampleBilinear2DAaBackward0", "UpsampleBilinear2DBackward0", "UpsampleLinear1DBackward0",
    "UpsampleNearest1DBackward0", "UpsampleNearest2DBackward0", "UpsampleNearest3DBackward0",
    "UpsampleNearestExact2DBackward0", "UpsampleTrilinear3DBackward0", "ViewAsComplexBackward0",
    "ViewAsRealBackward0", "WhereBackward0", "XlogyBackward2",
};

/* The same, where the derivative is largest where a product is zero, as of exp(-x * x), or falls to zero elsewhere. */
static const char *const peaks[] = {
    "AsinhBackward0", "AtanBackward0", "BinaryCrossEntropyWithLogitsBackward0", "CeluBackward0",
    "ClampBackward0", "ClampBackward1", "ClampMaxBackward0", "ClampMaxBackward1", "ClampMinBackward0",
    "ClampMinBackward1", "EluBackward1", "ErfBackward0", "ErfcBackward0", "Exp2Backward0", "ExpBackward0",
    "Expm1Backward0", "HardsigmoidBackward0", "HardtanhBackward0", "Logaddexp2Backward0", "LogaddexpBackward0",
    "PowBackward2", "SigmoidBackward0", "SoftMarginLossBackward0", "TanhBackward0",
};

/* The same, from all values along some dimensions. */
static const char *const sums[] = {
    "LogsumexpBackward0", "MeanBackward0", "MeanBackward1", "NansumBackward0", "SumBackward0", "SumBackward1",
    "TraceBackward0",
};

/* The same, but where all these are small the derivative has no bound. */
static const char *const norms[] = {
    "LinalgVectorNormBackward0", "NormBackward0", "NormBackward1", "NormBackward2", "NormBackward3",
    "StdBackward0", "StdMeanBackward0", "VarBackward0", "VarMeanBackward0",
};

/* Nodes whose every value comes from many. */
static const char *const mixes[] = {
    "BatchNormNoUpdateBackward0", "CudnnAttentionBackward0", "DotBackward0",
    "EfficientAttentionBackward0", "FftC2CBackward0", "FftC2RBackward0", "FftR2CBackward0",
    "FlashAttentionBackward0", "LogcumsumexpBackward0", "MaskedSoftmaxBackward0",
    "NativeBatchNormLegitBackward1",
    "ScaledDotProductFusedAttentionOverrideableBackward0", "ThnnFusedGruCellBackward0",
    "ThnnFusedLstmCellBackward0", "VdotBackward0",
};

/* Elementwise nodes whose derivative has no bound: beside a pole or an edge of their domain it grows, and with it the
 * error of what a product behind them has saved.  PowBackward0 is one if its exponent is less than 1. */
static const char *const poles[] = {
    "AcosBackward0", "AcoshBackward0", "AngleBackward0", "AsinBackward0", "Atan2Backward0", "AtanhBackward0",
    "BinaryCrossEntropyBackward0", "DigammaBackward0", "ErfinvBackward0", "LgammaBackward0", "Log10Backward0",
    "Log1PBackward0", "Log2Backward0", "LogBackward0", "LogitBackward0", "ReciprocalBackward0",
    "RsqrtBackward0", "SgnBackward0", "SpecialEntrBackward0", "SqrtBackward0", "TanBackward0", "XlogyBackward1",
};

/* The same by their first argument, their second, their third. */
static const char *const poles_0[] = {"PowBackward1"};
static const char *const poles_1[] = {"DivBackward0", "DivBackward2", "XlogyBackward0"};
static const char *const poles_2[] = {"AddcdivBackward0"};

static const char *const families[] = {
    "linear", "matmul", "convolution", "product", "attention", "norm", "rnn", "activation", "pooling", "softmax",
    "log_softmax",
};

_Static_assert(sizeof families / sizeof families[0] == GCK_NFAMILIES, "one name a family");

/* How a tensor of this role is kept, for the documentation. */
static const char *const texts[] = {
    [GCK_ROLE_VALUES] = "with the codec",
    [GCK_ROLE_FACTOR] = "with the codec, unless it has fewer values than the product",
    [GCK_ROLE_POWER] = "with the codec if the exponent is 2, 3 or 4",
    [GCK_ROLE_CUT] = "with the codec, clamped to +-20 unless rows are a multiple of 128",
    [GCK_ROLE_CUT_OF_ONE] = "with the codec if alpha or beta is 1, clamped as for SiLU",
    [GCK_ROLE_ROWS] = "with the codec if rows are a multiple of 128 or of like size",
    [GCK_ROLE_PLANES] = "with the codec if a channel has 128 values or more",
    [GCK_ROLE_ATTENTION] = "with the codec, unless dropout or other hooks keep the result",
    [GCK_ROLE_AGAIN] = "not at all: made again from what is stored of the others",
    [GCK_ROLE_ROUNDED] = "float32 as `fp16`",
    [GCK_ROLE_PROBABILITIES] = "float32 as `bf16`, rows scaled to the sum 1 when restored",
    [GCK_ROLE_POSITIVE] = "one bit per value: is it positive",
    [GCK_ROLE_POSITIVE_OR_NAN] = "one bit per value: is it positive or NaN",
};

int gck_saved_row_is_result(const gck_saved_row *row)
{
    return strncmp(row->argument, "result", 6) == 0 || strncmp(row->argument, "output", 6) == 0;
}

int gck_family_of(const char *name)
{
    for (int f = 0; f < GCK_NFAMILIES; f++) {
        if (strcmp(families[f], name) == 0) {
            return f;
        }
    }
    return -1;
}

const char *gck_family_name(gck_family family) { return families[family]; }

/* ---- kinds ---- */

/* Make the dict from names to kinds, and the tuple of the rows' attributes.  The kind of a Function that a Python class
 * defines is that of the first of its name, as a row is: both are set from the last on.  0 or -1. */
static int learn_names(gck_state *state)
{
    GCK_SCOPED PyObject *names = PyDict_New(), *attributes = PyList_New(0);
    int n = 0;

    for (int i = 0; attributes != NULL && i < NROWS; i++) {
        PyObject *attribute = PyUnicode_FromFormat("_raw_saved_%s", rows[i].argument);
        if (attribute != NULL) {
            PyUnicode_InternInPlace(&attribute);
        }
        gck_add_item(&attributes, attribute);
    }
    while (gck_function_at(n) != NULL) {
        n++;
    }
    while (n-- > 0) {
        gck_set_item(&names, gck_function_at(n)->node, PyLong_FromLong(NROWS + n));
    }
    for (int i = NROWS - 1; i >= 0; i--) {
        gck_set_item(&names, rows[i].node, PyLong_FromLong(i));
    }
    gck_set_item(&names, "AccumulateGrad", PyLong_FromLong(GCK_NODE_LEAF));
#define SET(list, kind)                                                                  \
    for (size_t i = 0; i < sizeof (list) / sizeof (list)[0]; i++) {                      \
        gck_set_item(&names, (list)[i], PyLong_FromLong(kind));                          \
    }
    SET(views, GCK_NODE_VIEW)
    SET(plain, GCK_NODE_PLAIN)
    SET(peaks, GCK_NODE_PEAK)
    SET(sums, GCK_NODE_SUM)
    SET(norms, GCK_NODE_NORM)
    SET(mixes, GCK_NODE_MIX)
    SET(poles, GCK_NODE_POLE)
    SET(poles_0, GCK_NODE_POLE_0)
    SET(poles_1, GCK_NODE_POLE_1)
    SET(poles_2, GCK_NODE_POLE_2)
#undef SET
    attributes = gck_as_tuple(attributes);
    if (names != NULL && attributes != NULL && state->node_names == NULL) {
        state->nodes_tell = PyObject_HasAttrString(state->py.saved_tensor_type, "data");
        state->node_names = Py_NewRef(names);
        state->saved_attributes = Py_NewRef(attributes);
    }
    return names != NULL && attributes != NULL ? 0 : -1;
}

/* The kind of a Function's node, of the name of which the first has this kind; below GCK_NODE_LEAF: an exception. */
static int kind_of_function(const gck_state *state, PyObject *node, int first)
{
    const int index = state->nodes_tell ? gck_function_of(&state->py, node, first - NROWS) : -1;

    if (index < 0) {
        return index == -1 ? GCK_NODE_OTHER : GCK_NODE_LEAF - 1;
    }
    return gck_function_at(index)->rows[0].node != NULL ? NROWS + index : gck_function_at(index)->kind;
}

int gck_node_kind(gck_state *state, PyObject *node)
{
    PyObject *type = (PyObject *)Py_TYPE(node), *known;
    long kind = GCK_NODE_OTHER;

    if (state->node_kinds == NULL && (learn_names(state) < 0 || (state->node_kinds = PyDict_New()) == NULL)) {
        return GCK_NODE_LEAF - 1;
    }
    if ((known = PyDict_GetItemWithError(state->node_kinds, type)) != NULL) {
        kind = PyLong_AsLong(known);
        return kind == -1 && PyErr_Occurred() ? GCK_NODE_LEAF - 1 : (int)kind;
    }
    GCK_SCOPED PyObject *name = PyErr_Occurred() ? NULL : PyType_GetName((PyTypeObject *)type);
    known = name != NULL ? PyDict_GetItemWithError(state->node_names, name) : NULL;
    if (known != NULL) {
        kind = PyLong_AsLong(known);
    }
    if (kind >= NROWS && !PyErr_Occurred()) {
        return kind_of_function(state, node, (int)kind);
    }
    /* The types of torch's own nodes are static; one of a Function in Python may die. */
    GCK_SCOPED PyObject *number = PyErr_Occurred() || gck_is_function(node) ? NULL : PyLong_FromLong(kind);
    if (number != NULL) {
        PyDict_SetItem(state->node_kinds, type, number);
    }
    return PyErr_Occurred() ? GCK_NODE_LEAF - 1 : (int)kind;
}

const gck_function *gck_node_function(int kind)
{
    return kind >= NROWS ? gck_function_at(kind - NROWS) : NULL;
}

const gck_saved_row *gck_saved_row_of(int kind, int n)
{
    const gck_function *function = gck_node_function(kind);
    const int others = function == NULL
        && (kind < 0 || kind + n >= NROWS || strcmp(rows[kind + n].node, rows[kind].node) != 0);
    const gck_saved_row *row = others ? NULL : function != NULL ? &function->rows[n] : &rows[kind + n];

    return row != NULL && row->node != NULL ? row : NULL;
}

PyObject *gck_saved_attribute(const gck_state *state, int kind, int n)
{
    return kind < NROWS ? PyTuple_GetItem(state->saved_attributes, kind + n) : NULL;
}

/* ---- the node of a tensor ---- */

/* What other hooks passed in place of a tensor, without its history: replace it by the tensor itself,
 * where that is known.  0 or -1. */
static int find_original(gck_state *state, gck_input *in)
{
    if (PyDict_GetItemWithError(PyImport_GetModuleDict(), state->py.names.torch_remat) == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    GCK_SCOPED PyObject *original = PyObject_CallFunctionObjArgs(state->py.call.original_of, in->x, NULL);
    if (original != NULL && original != Py_None) {
        gck_input_clear(in);
        *in = gck_input_of(original);
    }
    return original == NULL ? -1 : gck_input_read(&state->py, in, GCK_FACT_GRAD);
}

PyObject *gck_node_of(gck_state *state, gck_input *in)
{
    PyObject *x = in->x, *node = NULL;

    if ((PyObject *)Py_TYPE(x) == state->py.Tensor) {                /* faster: one question for three */
        node = PyObject_GetAttr(x, state->py.names.grad_fn);
        if (node == NULL || node != Py_None) {
            in->requires_grad = 1;
            in->leaf = 0;
            in->known |= GCK_FACT_GRAD | GCK_FACT_LEAF;
            return node;
        }
        Py_DECREF(node);
    }
    if (gck_input_read(&state->py, in, GCK_FACT_GRAD) < 0 || (!in->requires_grad && find_original(state, in) < 0)) {
        return NULL;
    }
    return in->requires_grad && (node == NULL || in->x != x) ? PyObject_GetAttr(in->x, state->py.names.grad_fn)
                                                             : Py_NewRef(Py_None);
}

/* ---- for the documentation ---- */

PyObject *gck_saved_roles(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);

    for (int i = 0; list != NULL && i < NROWS; i++) {
        const gck_saved_row *row = &rows[i];
        gck_add_item(&list, Py_BuildValue("(sszs)", row->node, row->argument,
                                          row->family < GCK_NFAMILIES ? families[row->family] : NULL,
                                          texts[row->role]));
    }
    return list;
}

/* ---- for compiled graphs ---- */

static const char *const role_names[] = {
    [GCK_ROLE_VALUES] = "values",
    [GCK_ROLE_FACTOR] = "factor",
    [GCK_ROLE_POWER] = "power",
    [GCK_ROLE_CUT] = "cut",
    [GCK_ROLE_CUT_OF_ONE] = "cut of one",
    [GCK_ROLE_ROWS] = "rows",
    [GCK_ROLE_PLANES] = "planes",
    [GCK_ROLE_ATTENTION] = "attention",
    [GCK_ROLE_AGAIN] = "again",
    [GCK_ROLE_ROUNDED] = "rounded",
    [GCK_ROLE_PROBABILITIES] = "probabilities",
    [GCK_ROLE_POSITIVE] = "positive",
    [GCK_ROLE_POSITIVE_OR_NAN] = "positive or nan",
};

static const char *const kind_names[] = {
    [-GCK_NODE_VIEW] = "view",     [-GCK_NODE_PLAIN] = "plain",   [-GCK_NODE_PEAK] = "peak",
    [-GCK_NODE_SUM] = "sum",       [-GCK_NODE_NORM] = "norm",     [-GCK_NODE_MIX] = "mix",
    [-GCK_NODE_POLE] = "pole",     [-GCK_NODE_POLE_0] = "pole 0", [-GCK_NODE_POLE_1] = "pole 1",
    [-GCK_NODE_POLE_2] = "pole 2", [-GCK_NODE_LEAF] = "leaf",
};

/* New reference: the rows of a node, of which this is the first. */
static PyObject *rows_of(int first)
{
    PyObject *list = PyList_New(0);
    const gck_saved_row *row;

    for (int i = 0; list != NULL && (row = gck_saved_row_of(first, i)) != NULL; i++) {
        gck_add_item(&list, Py_BuildValue("(ssz)", row->argument, role_names[row->role],
                                          row->family < GCK_NFAMILIES ? families[row->family] : NULL));
    }
    return list;
}

PyObject *gck_saved_nodes(PyObject *module, PyObject *Py_UNUSED(unused))
{
    gck_state *state = PyModule_GetState(module);
    PyObject *name, *number;
    Py_ssize_t at = 0;

    if (state->node_names == NULL && learn_names(state) < 0) {
        return NULL;
    }
    GCK_SCOPED PyObject *found = PyDict_New();
    while (found != NULL && PyDict_Next(state->node_names, &at, &name, &number)) {
        const long kind = PyLong_AsLong(number);
        if (kind >= NROWS) {                     /* a Function in Python, which a compiler traces */
            continue;
        }
        GCK_SCOPED PyObject *value = kind >= 0 ? rows_of((int)kind) : PyUnicode_FromString(kind_names[-kind]);
        if (value == NULL || PyDict_SetItem(found, name, value) < 0) {
            return NULL;
        }
    }
    return gck_give(&found);
}
