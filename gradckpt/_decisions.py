"""What operators decide: which ones do, and what is kept of each so that a recompute decides alike.

An operator decides when a small change of its input can change its output, or the gradient through it, altogether. A
*form* says what is kept of such a call in place of copies of its outputs. :data:`NOT_KEPT` says why nothing is kept of
the others; tests/selective/test_deciding_operators.py looks at every operator of torch's OpInfo list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class Form(Protocol):
    """What is kept of a call. Both methods run without grad, and no region sees the operators that they call."""

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        """Return what is kept and its bytes; None: nothing, the call runs again."""

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        """Return the outputs of the call, which has these arguments in the recompute."""


# ---- indices ----


def narrow(index: torch.Tensor, bound: int) -> torch.Tensor:
    """Return integers from 0 to below ``bound`` in as few bytes as they need; two bytes hold 16 bits without a sign."""
    for limit, dtype in ((1 << 8, torch.uint8), (1 << 16, torch.int16), (1 << 31, torch.int32)):
        if bound <= limit:
            return index.to(dtype, copy=True)
    return index.clone()


def widen(index: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return what :func:`narrow` was given, in new memory."""
    wide = index.to(dtype, copy=True)
    return wide.bitwise_and_(0xFFFF) if index.dtype is torch.int16 else wide


def _nbytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(x.nbytes for x in tensors)


class Indices:
    """Indices among the outputs, in as few bytes as they need; the first ``values`` outputs are copied."""

    def __init__(self, bound: Callable[[Args, Kwargs], int], values: int = 0) -> None:
        self.bound, self.values = bound, values

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int]:
        outputs = out if isinstance(out, tuple) else (out,)
        bound = self.bound(args, kwargs or {})
        copies = [x.clone() if i < self.values else narrow(x, bound) for i, x in enumerate(outputs)]
        kept = tuple(copies)
        return (kept, tuple(x.dtype for x in outputs), isinstance(out, tuple)), _nbytes(kept)

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        tensors, dtypes, several = kept
        pairs = enumerate(zip(tensors, dtypes, strict=True))
        outputs = tuple(x.clone() if i < self.values else widen(x, dtype) for i, (x, dtype) in pairs)
        return outputs if several else outputs[0]


def _argument(args: Args, kwargs: Kwargs, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _along(position: int, default: Any = -1) -> Callable[[Args, Kwargs], int]:
    """Return the size of the dimension that the argument at that position names; None there: of all."""

    def bound(args: Args, kwargs: Kwargs) -> int:
        dim = _argument(args, kwargs, position, "dim", default)
        x: torch.Tensor = args[0]
        return x.numel() if dim is None else x.size(dim) if x.dim() else 1

    return bound


def _boundaries(position: int) -> Callable[[Args, Kwargs], int]:
    return lambda args, kwargs: int(args[position].size(-1)) + 1


def _any_size(args: Args, kwargs: Kwargs) -> int:
    return int(max((1, *args[0].shape)))


def _count(args: Args, kwargs: Kwargs) -> int:
    return int(args[0].numel()) + 1


# ---- results that backward compares with the input ----


def _slices(x: torch.Tensor, dims: Any) -> torch.Tensor:
    """Return x with the dimensions that are reduced as one, the last."""
    if dims is None or dims == []:
        return x.reshape(-1)
    reduced = [d % max(x.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims)]
    rest = [d for d in range(x.dim()) if d not in reduced]
    return x.permute(*rest, *reduced).flatten(len(rest)) if x.dim() else x.reshape(-1)


class Choice:
    """Where in its input each result lies. The recompute finds its own value there, so that the backward, which looks
    for the result in the input, finds it in the same place. Of several equal values one gets the gradient, with those
    that are equal to it in the restored input."""

    def __init__(self, find: tuple[Callable[..., torch.Tensor], ...], dims: int | None, value: Any = None) -> None:
        self.find, self.dims, self.value = find, dims, value

    def _dims(self, args: Args, kwargs: Kwargs | None) -> Any:
        return None if self.dims is None else _argument(args, kwargs or {}, self.dims, "dim", None)

    def _values(self, args: Args, kwargs: Kwargs | None) -> torch.Tensor:
        x = _slices(args[0], self._dims(args, kwargs))
        return x if self.value is None else self.value(x)

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        x = self._values(args, kwargs)
        outputs = out if isinstance(out, tuple) else (out,)
        if x.numel() == 0 or not x.is_floating_point():
            return None
        found = (find(x, each) for find, each in zip(self.find, outputs, strict=True))
        kept = tuple(narrow(index, x.size(-1)) for index in found)
        return (kept, outputs[0].shape, outputs[0].dtype, isinstance(out, tuple)), _nbytes(kept)

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        indices, shape, dtype, several = kept
        x = self._values(args, kwargs)
        outputs = tuple(x.gather(-1, widen(i).unsqueeze(-1)).reshape(shape).to(dtype) for i in indices)
        return outputs if several else outputs[0]


class InfinityNorm(Choice):
    """A :class:`Choice` where the norm is one: the largest or the smallest magnitude."""

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        order = _argument(args, kwargs or {}, 1, "ord", 2)
        if not isinstance(order, (int, float)) or not math.isinf(order):
            return None
        self_ = Choice((_largest if order > 0 else _smallest,), self.dims, torch.abs)
        return self_.keep(args, kwargs, out)


def _largest(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return x.argmax(-1)


def _smallest(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return x.argmin(-1)


def _equal(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return x.eq(out).logical_or_(x.ne(x).logical_and_(out.ne(out))).to(torch.uint8).argmax(-1)


# ---- others ----


class Pool:
    """Where in its plane each maximum lies; the recompute finds its own values there."""

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim
        self.channels_last = torch.channels_last if ndim == 2 else torch.channels_last_3d

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int]:
        values, index = out
        kept = narrow(index, math.prod(args[0].shape[-self.ndim :]))
        last = values.dim() == self.ndim + 2 and not values.is_contiguous()
        return (kept, self.channels_last if last else torch.contiguous_format), kept.nbytes

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        narrowed, layout = kept
        index = widen(narrowed)
        planes = args[0].flatten(-self.ndim)
        values = planes.gather(-1, index.flatten(-self.ndim)).reshape(index.shape)
        return values.contiguous(memory_format=layout), index.contiguous(memory_format=layout)


class Written:
    """What the operator writes into its arguments, which is what it returns."""

    def __init__(self, op: Any) -> None:
        self.at = [(i, a.name) for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def _arguments(self, args: Args, kwargs: Kwargs | None) -> tuple[torch.Tensor, ...]:
        return tuple(_argument(args, kwargs or {}, i, name, None) for i, name in self.at)

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int]:
        kept = tuple(x.clone() for x in self._arguments(args, kwargs))
        return kept, _nbytes(kept)

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        written = self._arguments(args, kwargs)
        for x, value in zip(written, kept, strict=True):
            if x.shape != value.shape:
                x.resize_(value.shape)
            x.copy_(value)
        return written if len(written) > 1 else written[0]


class Slopes:
    """``rrelu``'s slopes: of each value the drawn one, or 1; it draws for negative values only."""

    def __init__(self, inplace: bool) -> None:
        self.inplace = inplace

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        if not _argument(args, kwargs or {}, 4, "training", False):
            return None
        kept = args[1].clone()
        return kept, kept.nbytes

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        args[1].copy_(kept)
        return args[0].mul_(kept) if self.inplace else args[0] * kept


# ---- the table ----

_ROW = Indices(_along(1, None))
_MAXIMUM, _MINIMUM = Choice((_largest,), None), Choice((_smallest,), None)

#: Kept by default, of ``"mm.default"`` or, for every overload that does not write, ``"topk"``: its form; None: copies
#: of its outputs, bool as bits.
KEPT: dict[str, Form | None] = {
    # selections: values are copied, so that sorted ones stay sorted
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
    "nonzero": Indices(_any_size),
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
    "median.default": Choice((_equal,), None),
    "nanmedian.default": Choice((_equal,), None),
    "amax.default": Choice((_largest,), 1),
    "amin.default": Choice((_smallest,), 1),
    "aminmax.default": Choice((_smallest, _largest), 1),
    "linalg_vector_norm.default": InfinityNorm((), 2, torch.abs),
    "max_pool2d_with_indices.default": Pool(2),
    "max_pool3d_with_indices.default": Pool(3),
    "adaptive_max_pool2d.default": Pool(2),
    "adaptive_max_pool3d.default": Pool(3),
    "fractional_max_pool2d.default": Pool(2),
    "fractional_max_pool3d.default": Pool(3),
    # comparisons
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne", "equal", "allclose", "isin", "signbit"), None),
    **dict.fromkeys(("isinf", "isposinf", "isneginf"), None),
    # draws whose result, or whose number, depends on values
    "multinomial.default": Indices(lambda args, kwargs: args[0].size(-1)),
    **dict.fromkeys(("bernoulli", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"), None),
    "rrelu_with_noise.default": Slopes(inplace=False),
    "rrelu_with_noise_.default": Slopes(inplace=True),
    # the signs of eigenvectors; their backward needs the results alone
    **dict.fromkeys(("_linalg_eigh", "_linalg_svd", "linalg_eig"), None),
}

#: Operators that write what one of :data:`KEPT` returns; so do the overloads of these with ``out=``.
WRITING = ("gt_", "ge_", "lt_", "le_", "eq_", "ne_", "bernoulli_.Tensor")

#: Results of these are the integers nearby. They are as large as activations and have no gradient, and code that
#: rounds on purpose (straight-through) sees at most one step of difference: kept on request, with the casts.
ROUNDING = (
    *("round", "floor", "ceil", "trunc", "frac", "sign", "sgn", "heaviside", "floor_divide", "remainder", "fmod"),
    *("div.Tensor_mode", "div.Scalar_mode"),
)


#: Operators of the same kinds whose results are not kept, by the reason.
NOT_KEPT: dict[str, tuple[str, ...]] = {
    # The value is continuous; the gradient changes hands where two values are equal. A bit or more for every value
    # would have to be kept, and most of these compare their restored inputs in the backward, where no result counts.
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
    "only exact zeros decide; a comparison with zero is kept": ("count_nonzero",),
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
        *("_cudnn_attention_forward", "_cudnn_attention_backward", "_triton_scaled_dot_attention"),
        *("_fill_mem_eff_dropout_mask_", "_nested_tensor_softmax_with_shape"),
    ),
}


def overloads(name: str, writing: bool = False) -> list[Any]:
    """Return the operators on tensors of that name that this torch has; writing: those that write into arguments."""
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    names = [overload] if overload else packet.overloads() if packet else []
    found = (getattr(packet, each, None) for each in names)
    return [op for op in found if op is not None and _on_tensors(op) and op._schema.is_mutable == writing]


def _on_tensors(op: Any) -> bool:
    arguments = op._schema.arguments
    written = (a for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return any(str(a.type) == "Tensor" for a in arguments) and all(str(a.type) == "Tensor" for a in written)


def _forms() -> dict[Any, Form | None]:
    own = ("rrelu_with_noise.default", "rrelu_with_noise_.default")
    forms = {op: KEPT[name] for name in KEPT for op in overloads(name, writing=name in own)}
    outs = dict.fromkeys(name.partition(".")[0] for name in KEPT if name not in own)
    forms.update((op, Written(op)) for name in (*WRITING, *outs) for op in overloads(name, writing=True))
    return forms


#: What is kept of each operator that decides.
FORMS: dict[Any, Form | None] = _forms()
