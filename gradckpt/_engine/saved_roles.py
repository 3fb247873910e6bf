"""Which tensors of the autograd graph compress_saved() encodes with a lossy codec, and how.

Only C calls this (csrc/engine), for each tensor that autograd saves. Whatever :data:`TABLE` does
not list is kept exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private

#: How a tensor is encoded: the codec, or None for that of the block; and the tensor encoded in its
#: place, or None for itself. None in place of a form means that the tensor is kept exactly.
Form = tuple[str | None, torch.Tensor | None]

PLAIN: Form = (None, None)


class Role(NamedTuple):
    """A role of a tensor in backward: a description, and the form for a tensor that this node
    saves.
    """

    text: str
    form: Callable[[Any, torch.Tensor], Form | None]


# ---- roles ----


def _factor(node: Any, x: torch.Tensor) -> Form | None:
    values = x.numel()
    if 0 in x.stride():  # expanded: only one value counts
        values = math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step)
    return PLAIN if values >= math.prod(node._input_metadata[0].shape) else None


def _cut(node: Any, x: torch.Tensor) -> Form:
    """Clamp the values where a group of the codec holds several rows, because one row may be much
    larger.
    """
    row = x.numel() // max(1, x.shape[0]) if x.ndim > 3 else x.shape[-1] if x.ndim else 1
    return PLAIN if row % 128 == 0 else (None, x.detach().clamp(-20, 20))  # detached, because grad mode may be on


def _cut_of_one(node: Any, x: torch.Tensor) -> Form | None:
    scale = node._saved_alpha if hasattr(node, "_saved_alpha") else node._saved_beta
    return _cut(node, x) if scale == 1 else None


def _power(node: Any, x: torch.Tensor) -> Form | None:
    return PLAIN if node._saved_exponent in (2, 3, 4) else None


def _rows(node: Any, x: torch.Tensor) -> Form | None:
    if hasattr(node, "_saved_normalized_shape"):
        values = math.prod(node._saved_normalized_shape)  # values that share one mean and scale
    else:
        values = node._saved_C * node._saved_HxW // node._saved_group
    looked_at = x.is_cpu and values >= 32 and _kept(node, "result1") is not None
    return PLAIN if values % 128 == 0 or (looked_at and _rows_are_alike(x.detach().reshape(-1, values))) else None


def _kept(node: Any, *arguments: str) -> torch.Tensor | None:
    """Return the uncompressed tensor that the node saves through ``compress_saved()``.

    It returns None where outer hooks hold the tensor. Unpacking it there may recompute a region,
    which gets other values than its forward but must make the same choice.
    """
    names = [f"_raw_saved_{argument}" for argument in arguments]
    raw = next((getattr(node, name) for name in names if hasattr(node, name)), None)
    value = getattr(getattr(raw, "data", None), "value", None)
    return value if isinstance(value, torch.Tensor) else None


def _holds(condition: torch.Tensor) -> bool:
    """Return whether it holds everywhere; on paper, where values are assumed to be ordinary, it
    does.
    """
    everywhere = condition.all()
    return _C.on_paper() or bool(everywhere)


def _rows_are_alike(rows: torch.Tensor) -> bool:
    """Return whether groups of 128 values can hold several of these rows without one vanishing
    beside another.
    """
    touching = min(127 // rows.shape[1] + 2, rows.shape[0])  # rows that share a group
    variance, mean = torch.var_mean(rows.float(), 1, correction=0)
    largest = torch.nn.functional.max_pool1d((variance + mean.square())[None], touching, 1)
    least = -torch.nn.functional.max_pool1d(-variance[None], touching, 1)
    return _holds(largest < 16 * least)  # false for rows that are not finite or have no spread


def _planes(node: Any, x: torch.Tensor) -> Form | None:
    return PLAIN if x.numel() >= 128 * x.shape[1] else None


def _logits(node: Any, x: torch.Tensor) -> Form | None:
    sums = _kept(node, "logsumexp", "log_sumexp")
    # reading the answer from a device would synchronize
    return PLAIN if not x.is_cpu or (sums is not None and _holds(sums.abs() < 30)) else None


VALUES = Role("with the codec", lambda node, x: PLAIN)
FACTOR = Role("with the codec, unless it has fewer values than the product", _factor)
CUT = Role("with the codec, clamped to +-20 unless rows are a multiple of 128", _cut)
CUT_OF_ONE = Role("with the codec if alpha or beta is 1, clamped as for SiLU", _cut_of_one)
FP16 = Role("float32 as `fp16`", lambda node, x: ("fp16", None))
BF16 = Role("float32 as `bf16`", lambda node, x: ("bf16", None))
POSITIVE = Role("one bit per value: is it positive", lambda node, x: ("mask", x.detach().gt(0)))
POSITIVE_OR_NAN = Role(
    "one bit per value: is it positive or NaN", lambda node, x: ("mask", x.detach().le(0).logical_not_())
)
POWER = Role("with the codec if the exponent is 2, 3 or 4", _power)
ROWS = Role("with the codec if rows are a multiple of 128 or of like size", _rows)
PLANES = Role("with the codec if a channel has 128 values or more", _planes)
LOGITS = Role("with the codec if every log-sum-exp is below 30 or on a GPU", _logits)

_ATTENTION = {"query": LOGITS, "key": LOGITS, "value": VALUES, "output": VALUES}

#: The autograd node that saves a tensor, by torch's name, and the node's name for the tensor
#: (``node._raw_saved_<argument>``). "result" and "output" are the operator's results; all others
#: are its inputs.
TABLE: dict[str, dict[str, Role]] = {
    # products: the gradient is linear in the saved tensor
    "AddmmBackward0": {"mat1": VALUES, "mat2": VALUES},
    "MmBackward0": {"self": VALUES, "mat2": VALUES},
    "BmmBackward0": {"self": VALUES, "mat2": VALUES},
    "BaddbmmBackward0": {"batch1": VALUES, "batch2": VALUES},
    "AddbmmBackward0": {"batch1": VALUES, "batch2": VALUES},
    "MvBackward0": {"self": VALUES},
    "AddmvBackward0": {"mat": VALUES},
    "LinearBackward0": {"input": VALUES, "weight": VALUES},
    "MkldnnLinearBackward0": {"self": VALUES, "weight": VALUES},
    "TrilinearBackward0": {"i1": VALUES, "i2": VALUES, "i3": VALUES},
    "ConvolutionBackward0": {"input": VALUES, "weight": VALUES},
    "ConvolutionOverrideableBackward0": {"input": VALUES, "weight": VALUES},
    "MulBackward0": {"self": FACTOR, "other": FACTOR},
    "AddcmulBackward0": {"tensor1": FACTOR, "tensor2": FACTOR},
    "PowBackward0": {"self": POWER},
    # attention: its log-sum-exp is exact
    "ScaledDotProductFlashAttentionForCpuBackward0": _ATTENTION,
    "ScaledDotProductFlashAttentionBackward0": _ATTENTION,
    "ScaledDotProductEfficientAttentionBackward0": _ATTENTION,
    "ScaledDotProductCudnnAttentionBackward0": _ATTENTION,
    # norms: their means and scales are exact
    "NativeLayerNormBackward0": {"input": ROWS},
    "NativeGroupNormBackward0": {"input": ROWS},
    "NativeBatchNormBackward0": {"input": PLANES},
    "CudnnBatchNormBackward0": {"input": PLANES},
    "MiopenBatchNormBackward0": {"input": PLANES},
    "FusedRmsNormBackward0": {"input": ROWS},
    # recurrent layers
    "MkldnnRnnLayerBackward0": {"input": VALUES, "hx_": VALUES, "cx_": VALUES, "result0": VALUES},
    "CudnnRnnBackward0": {"input": VALUES},
    # activations whose derivative is continuous, and constant beyond 20
    "SiluBackward0": {"self": CUT},
    "GeluBackward0": {"self": CUT},
    "MishBackward0": {"self": CUT},
    "SoftplusBackward0": {"self": CUT_OF_ONE},
    "EluBackward0": {"self": CUT_OF_ONE},
    "LogSigmoidBackward0": {"self": CUT},
    # activations whose backward reads only a sign; masks of x <= 0 and of x > 0 differ for NaN, and
    # so do these
    "ReluBackward0": {"result": POSITIVE_OR_NAN},
    "LeakyReluBackward0": {"self": POSITIVE},
    "LeakyReluBackward1": {"result": POSITIVE},
    # probabilities: later operators may divide by them, so the relative error has to be small;
    # backward takes the exponential of their logarithms, so there the absolute error has to be
    # small
    "SoftmaxBackward0": {"result": BF16},
    "SafeSoftmaxBackward0": {"result": BF16},
    "LogSoftmaxBackward0": {"result": FP16},
    "NllLossBackward0": {"self": FP16},
    "NllLoss2DBackward0": {"self": FP16},
    # only the shape of these is read
    "MaxPool2DWithIndicesBackward0": {"self": VALUES},
    "MaxPool3DWithIndicesBackward0": {"self": VALUES},
    "AdaptiveMaxPool2DBackward0": {"self": VALUES},
    "AvgPool2DBackward0": {"self": VALUES},
    "AvgPool3DBackward0": {"self": VALUES},
    "AdaptiveAvgPool2DBackward0": {"self": VALUES},
    "AdaptiveAvgPool3DBackward0": {"self": VALUES},
    "ReflectionPad1DBackward0": {"self": VALUES},
    "ReflectionPad2DBackward0": {"self": VALUES},
    "ReplicationPad1DBackward0": {"self": VALUES},
    "ReplicationPad2DBackward0": {"self": VALUES},
}


def _listed(results: bool) -> dict[str, list[tuple[str, Role]]]:
    """Return, by node, attribute and role of the listed arguments: of the results, or of the
    inputs.
    """
    return {
        node: [
            (f"_raw_saved_{argument}", role)
            for argument, role in arguments.items()
            if argument.startswith(("result", "output")) == results
        ]
        for node, arguments in TABLE.items()
    }


_INPUTS, _RESULTS = _listed(False), _listed(True)

# ---- which node saves a tensor ----

#: Errors by which torch and tensor subclasses refuse access.
_REFUSALS = (AttributeError, RuntimeError, NotImplementedError, TypeError)


#: Whether this torch tells what a node holds.
_TELLS = hasattr(private.SavedTensor, "data")


def _form(listed: dict[str, list[tuple[str, Role]]], node: Any, packed: Any, x: torch.Tensor) -> Form | None:
    """Return the form of ``x``, in whose place the node holds ``packed``.

    None means that no listed argument matches. A torch that does not tell what a node holds has the
    node's name alone decide.
    """
    for attribute, role in listed.get(type(node).__name__, ()):
        try:
            data = getattr(node, attribute).data if _TELLS else packed
            # a result that is about to be saved reads as None
            found = data is packed and (data is not None or not _TELLS or getattr(node, attribute[4:]) is None)
        except _REFUSALS:  # the node has no such argument here, or was freed
            found = False
        if found:
            return role.form(node, x)
    return None


def form_of_input(node: Any, packed: Any, x: torch.Tensor) -> Form | None:
    """Return the form of ``x``, an input of the node, for which a pack hook returned ``packed``."""
    return _form(_INPUTS, node, packed, x)


def form_when_packed(x: torch.Tensor, node: Any, number: int) -> Form | bool | None:
    """Return the form of ``x`` while the node of this number, which saves it, is being made.

    ``node`` is the history of ``x``. True means that ``x`` lies in the memory of a leaf, False that
    the saving node has to be seen first. A number below 0 means that the codec loses nothing.
    """
    if node is not None and _lies_in_leaf(x, node):
        return True
    if number < 0:
        return PLAIN
    made = -1 if node is None else node._sequence_nr()
    if not number <= made < 2**63:  # some nodes have no number, which reads as the largest
        return False
    return _form(_RESULTS, node, None, x) if made == number and x.output_nr == 0 else None


def nodes_behind(result: Any) -> list[Any]:
    """Return the nodes that made a function's results."""
    tensors = (leaf for leaf in private.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return [x.grad_fn for x in tensors if x.grad_fn is not None]


# ---- is it a weight ----

#: Nodes that pass values on unchanged, at another place or in another dtype.
_VIEWS = {
    "AliasBackward0",
    "AsStridedBackward0",
    "CloneBackward0",
    "DiagonalBackward0",
    "ExpandBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnbindBackward0",
    "UnfoldBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}

#: The most nodes between a weight and the saved view of it.
_MAX_STEPS = 16


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _storage(x: torch.Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except _REFUSALS:
        return 0


def _lies_in_leaf(x: torch.Tensor, node: Any) -> bool:
    """Return whether ``x`` shares its memory with a leaf, seen through views or casts."""
    for _ in range(_MAX_STEPS):
        if type(node).__name__ not in _VIEWS:
            break
        edges = node.next_functions
        if not edges or edges[0][0] is None:
            return False
        node = edges[0][0]
    if _is_leaf(node):
        return True
    leaves = [before for before, _ in node.next_functions if _is_leaf(before)]
    # a weight of an autograd Function
    return bool(leaves) and _storage(x) in [_storage(leaf.variable) or -1 for leaf in leaves]
