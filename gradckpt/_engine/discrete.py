"""Discrete operators, and what is kept of each so that the recompute returns the same.

A discrete operator is one whose output, or the gradient through it, can jump when its input changes
slightly. A *form* keeps less of such a call than copies of its outputs. :data:`NOT_KEPT` gives the
reason why nothing is kept of the others. tests/selective/test_deciding_operators.py checks torch's
operators by name, and test_jumps.py beside it checks their results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradckpt._engine.discrete_forms import (
    Args,
    Choice,
    Chosen,
    ChosenOfSegments,
    Farthest,
    Form,
    Indices,
    InfinityDistance,
    InfinityNorm,
    Kwargs,
    OfFloats,
    Pool,
    Slopes,
    Written,
    argument,
    largest,
    same,
    smallest,
)

# ---- how large an index may be ----


def _along(position: int, default: Any = -1) -> Callable[[Args, Kwargs], int]:
    """Return a function for the size of the dimension that this argument names.

    None there means all elements.
    """

    def bound(args: Args, kwargs: Kwargs) -> int:
        dim = argument(args, kwargs, position, "dim", default)
        x: torch.Tensor = args[0]
        return x.numel() if dim is None else x.size(dim) if x.dim() else 1

    return bound


def _boundaries(position: int) -> Callable[[Args, Kwargs], int]:
    return lambda args, kwargs: int(args[position].size(-1)) + 1


def _count(args: Args, kwargs: Kwargs) -> int:
    return int(args[0].numel()) + 1


# ---- which vectors have a distance ----


def _each_with_later(args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.triu_indices(len(args[0]), len(args[0]), 1, device=args[0].device)
    return args[0][first], args[0][second]


# ---- the table ----

_ROW = Indices(_along(1, None))
_MAXIMUM, _MINIMUM = Choice((largest,), None), Choice((smallest,), None)

#: Kept by default. The key is ``"mm.default"``, or ``"topk"`` for every overload that does not
#: write. The value is the form; None means copies of the outputs, bool as bits.
KEPT: dict[str, Form | None] = {
    # selections: values are copied, so that sorted values stay sorted
    "topk": Indices(_along(2), 1),
    "sort.default": Indices(_along(1), 1),
    "sort.stable": Indices(_along(2), 1),
    "kthvalue.default": Indices(_along(2), 1),
    "mode.default": Indices(_along(1), 1),
    "max.dim": Indices(_along(1), 1),
    "min.dim": Indices(_along(1), 1),
    "median.dim": Indices(_along(1), 1),
    "nanmedian.dim": Indices(_along(1), 1),
    "cummax.default": Indices(_along(1), 1),
    "cummin.default": Indices(_along(1), 1),
    "argmax": _ROW,
    "argmin": _ROW,
    "argsort.default": Indices(_along(1)),
    "argsort.stable": Indices(_along(1)),
    "nonzero": Indices(lambda args, kwargs: int(max((1, *args[0].shape)))),
    "nonzero_static": None,
    "searchsorted": Indices(_boundaries(0)),
    "bucketize": Indices(_boundaries(1)),
    "_unique2": Indices(_count, 1),
    "unique_consecutive": Indices(_count, 1),
    "unique_dim": Indices(_count, 1),
    "histc": None,
    # backward looks for the result in the input
    "max.default": _MAXIMUM,
    "min.default": _MINIMUM,
    "median.default": Choice((same,), None),
    "nanmedian.default": Choice((same,), None),
    "amax.default": Choice((largest,), 1),
    "amin.default": Choice((smallest,), 1),
    "aminmax.default": Choice((smallest, largest), 1),
    "linalg_vector_norm.default": InfinityNorm((1, "ord"), 2),
    "_cdist_forward.default": Farthest(2, lambda args: (args[0].unsqueeze(-2), args[1].unsqueeze(-3))),
    "_pdist_forward.default": Farthest(1, _each_with_later),
    "dist.default": InfinityDistance((2, "p"), None),
    "scatter_reduce.two": Chosen(),
    "scatter_reduce_.two": Chosen(inplace=True),
    "index_reduce.default": Chosen(),
    "index_reduce_.default": Chosen(inplace=True),
    "segment_reduce.default": ChosenOfSegments(),
    "max_pool2d_with_indices.default": Pool(2),
    "max_pool3d_with_indices.default": Pool(3),
    "adaptive_max_pool2d.default": Pool(2),
    "adaptive_max_pool3d.default": Pool(3),
    "fractional_max_pool2d.default": Pool(2),
    "fractional_max_pool3d.default": Pool(3),
    # comparisons
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne", "equal", "allclose", "isin", "signbit"), None),
    **dict.fromkeys(("isinf", "isposinf", "isneginf"), None),
    # a codec may restore a small nonzero value as zero
    **dict.fromkeys(
        ("logical_not", "logical_and", "logical_or", "logical_xor", "any", "all"), OfFloats(lambda args, kwargs: 2)
    ),
    "count_nonzero": OfFloats(_count),
    # draws whose result, or number of draws, depends on values
    "multinomial.default": Indices(lambda args, kwargs: args[0].size(-1)),
    **dict.fromkeys(("bernoulli", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"), None),
    "rrelu_with_noise.default": Slopes(inplace=False),
    "rrelu_with_noise_.default": Slopes(inplace=True),
    # signs and pivots: backward needs only the results
    **dict.fromkeys(("_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_qr", "geqrf"), None),
    **dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex", "linalg_ldl_factor_ex"), None),
    "frexp.Tensor": None,
}

#: Operators that write what an operator in :data:`KEPT` returns. So do the overloads with ``out=``.
WRITING = ("gt_", "ge_", "lt_", "le_", "eq_", "ne_", "bernoulli_.Tensor")

#: Their results are nearby integers. They are as large as activations and have no gradient, and
#: code that rounds on purpose (straight-through) sees at most one step of difference. They are kept
#: on request, with the casts.
ROUNDING = (
    *("round", "floor", "ceil", "trunc", "frac", "sign", "sgn", "heaviside", "floor_divide", "remainder", "fmod"),
    *("div.Tensor_mode", "div.Scalar_mode"),
)


#: Operators of the same kinds whose results are not kept, by reason.
NOT_KEPT: dict[str, tuple[str, ...]] = {
    # The value is continuous; only the gradient switches where two values are equal. Keeping them
    # would take a bit or more per value, and most compare their restored inputs in backward, where
    # a kept result has no effect.
    "a kink, and backward compares the inputs": (
        *("maximum", "minimum", "fmax", "fmin", "clamp_max", "clamp_min", "threshold"),
    ),
    "made of others, which are kept": (
        *("adaptive_max_pool1d", "max_pool1d", "max_pool1d_with_indices", "max_pool2d", "max_pool3d", "argwhere"),
        *("nonzero_numpy", "quantile", "isclose", "greater_equal", "less_equal", "not_equal", "is_nonzero"),
        *("linalg_matrix_norm", "linalg_norm", "frobenius_norm", "nuclear_norm", "histogramdd", "rrelu", "rrelu_"),
        *("_unique", "_aminmax", "norm_except_dim", "unique_dim_consecutive"),
    ),
    "called by others, which are kept": (
        *("_cummax_helper", "_cummin_helper", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts"),
        *("_histogramdd_from_bin_tensors", "rrelu_with_noise_functional"),
    ),
    "counts, without a gradient": ("histogram",),
    "older than linalg.vector_norm, which torch.norm calls": ("norm",),
    "indices come as an argument": ("max_unpool2d", "max_unpool3d"),
    "smooth": (
        *("_weight_norm", "_weight_norm_interface", "poisson_nll_loss", "special_gammainc", "special_gammaincc"),
        *("special_gammaln", "_dirichlet_grad", "_standard_gamma_grad"),
    ),
    "no values": ("is_signed", "_convolution_mode"),
    "draws as many numbers whatever the values, and its result follows them": (
        *("_philox_normal", "alpha_dropout", "alpha_dropout_", "cauchy", "cauchy_", "dropout", "dropout_"),
        *("exponential", "exponential_", "feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout"),
        *("feature_dropout_", "geometric", "geometric_", "log_normal", "log_normal_", "native_dropout", "normal"),
        *("normal_", "normal_functional", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
        *("random", "random_", "randperm", "uniform", "uniform_", "_fused_dropout", "gru", "lstm", "rnn_relu"),
        *("rnn_tanh", "_cudnn_rnn", "miopen_rnn", "_lstm_mps", "_cudnn_init_dropout_state"),
        *("scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_fused_sdp_choice"),
        *("_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"),
        *("_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_efficient_attention_backward"),
        *("_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace", "_efficient_attention_forward"),
        *("_cudnn_attention_forward", "_cudnn_attention_forward_no_dropout_inplace", "_cudnn_attention_backward"),
        "_triton_scaled_dot_attention",
        *("_fill_mem_eff_dropout_mask_", "_nested_tensor_softmax_with_shape"),
    ),
}


def overloads(name: str, writing: bool = False) -> list[Any]:
    """Return the operators on tensors of that name in this torch.

    With ``writing`` it returns those that write into their arguments.
    """
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    names = [overload] if overload else packet.overloads() if packet else []
    found = (getattr(packet, each, None) for each in names)
    return [op for op in found if op is not None and _on_tensors(op) and op._schema.is_mutable == writing]


def _on_tensors(op: Any) -> bool:
    arguments = op._schema.arguments
    written = (a for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return any(str(a.type) == "Tensor" for a in arguments) and all(str(a.type) == "Tensor" for a in written)


#: These write and have a form of their own. For the other writing overloads the written values are
#: kept.
WRITERS = (
    "rrelu_with_noise.default",
    "rrelu_with_noise_.default",
    "scatter_reduce_.two",
    "index_reduce_.default",
)


def _rounding() -> dict[Any, Form | None]:
    inplace = ("_.".join(name.split(".")) if "." in name else f"{name}_" for name in ROUNDING)
    forms: dict[Any, Form | None] = {op: None for name in ROUNDING for op in overloads(name)}
    return forms | {op: Written(op) for name in inplace for op in overloads(name, writing=True)}


def _forms() -> dict[Any, Form | None]:
    forms = {op: KEPT[name] for name in KEPT for op in overloads(name, writing=name in WRITERS)}
    seldom = (Slopes, Chosen, ChosenOfSegments)  # most calls of these are not discrete
    outs = dict.fromkeys(name.partition(".")[0] for name in KEPT if not isinstance(KEPT[name], seldom))
    forms.update((op, Written(op)) for name in (*WRITING, *outs) for op in overloads(name, writing=True))
    return forms


#: The form for each operator that rounds.
ROUNDING_FORMS: dict[Any, Form | None] = _rounding()

#: The form for each discrete operator.
FORMS: dict[Any, Form | None] = _forms()
