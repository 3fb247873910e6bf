"""Forms of discrete.py: the part of a discrete operator's call that is kept.

The recompute returns the outputs from that part and its own values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from gradckpt._C import encode

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class Form(Protocol):
    """A way to keep part of a call.

    Both methods run without grad, and no region sees the operators that they call.
    """

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        """Return what is kept and its bytes.

        None means that nothing is kept and the call runs again.
        """

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        """Return the outputs of the call, which has these arguments in the recompute."""


# ---- indices ----


def narrow(index: torch.Tensor, bound: int) -> torch.Tensor:
    """Return integers from 0 to ``bound`` - 1 in as few bytes as they need.

    Two bytes are int16, read as 16 bits without a sign.
    """
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
    """Keep indices among the outputs in as few bytes as they need, and copies of the first
    ``values`` outputs.
    """

    def __init__(self, bound: Callable[[Args, Kwargs], int], values: int = 0) -> None:
        self.bound, self.values = bound, values

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
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


def argument(args: Args, kwargs: Kwargs, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


# ---- results that backward compares with the input ----


def _slices(x: torch.Tensor, dims: Any) -> torch.Tensor:
    """Return x with the reduced dimensions merged into one, the last."""
    if dims is None or dims == []:
        return x.reshape(-1)
    reduced = [d % max(x.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims)]
    rest = [d for d in range(x.dim()) if d not in reduced]
    return x.permute(*rest, *reduced).flatten(len(rest)) if x.dim() else x.reshape(-1)


class Compared:
    """A form for results that backward compares with the inputs: restored inputs do not contain the
    exact result.
    """


class Choice(Compared):
    """Keep where in its input each result lies.

    The recompute reads its own value at that index, so that backward, which looks for the result in
    the input, finds it in the same place. One of several equal values gets the gradient, together
    with those that equal it in the restored input.
    """

    def __init__(self, find: tuple[Callable[..., torch.Tensor], ...], dims: int | None, value: Any = None) -> None:
        self.find, self.dims, self.value = find, dims, value

    def _dims(self, args: Args, kwargs: Kwargs | None) -> Any:
        return None if self.dims is None else argument(args, kwargs or {}, self.dims, "dim", None)

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
    """A :class:`Choice` for a norm that is the largest or the smallest magnitude."""

    def __init__(self, order: tuple[int, str], dims: int | None) -> None:
        super().__init__((largest,), dims, torch.abs)
        self.order = order
        self.least = copy.copy(self)
        self.least.find = (smallest,)

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        order = argument(args, kwargs or {}, *self.order, 2)
        if not isinstance(order, (int, float)) or not math.isinf(order):
            return None
        return Choice.keep(self if order > 0 else self.least, args, kwargs, out)


class InfinityDistance(InfinityNorm):
    """A :class:`Choice` for a distance that is the largest or the smallest difference."""

    def _values(self, args: Args, kwargs: Kwargs | None) -> torch.Tensor:
        differences: torch.Tensor = args[0] - args[1]
        return differences.abs().reshape(-1)


class Farthest(Compared):
    """Keep the coordinate in which the two vectors of each pair are farthest apart.

    This form is for distances that equal the largest difference. ``pairs`` turns both arguments
    into tensors that broadcast to one vector per distance.
    """

    def __init__(self, p: int, pairs: Callable[[Args], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.p, self.pairs = p, pairs

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        p = argument(args, kwargs or {}, self.p, "p", 2)
        if not math.isinf(p) or p < 0:
            return None
        a, b = self.pairs(args)
        index = torch.zeros(out.shape, dtype=torch.int64, device=out.device)
        # one coordinate at a time: all at once would take this many times the memory of the
        # distances
        for i in range(a.size(-1)):
            index.masked_fill_((a[..., i] - b[..., i]).abs_() == out, i)
        kept = narrow(index, a.size(-1))
        return kept, kept.nbytes

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        index = widen(kept).unsqueeze(-1)
        a, b = (x.expand(*index.shape[:-1], -1).gather(-1, index).squeeze(-1) for x in self.pairs(args))
        return a.sub_(b).abs_()


def largest(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return x.argmax(-1)


def smallest(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return x.argmin(-1)


def same(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return x.eq(out).logical_or_(x.ne(x).logical_and_(out.ne(out))).to(torch.uint8).argmax(-1)


# ---- others ----


class Pool:
    """Keep where in its plane each maximum lies. The recompute reads its own values there."""

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


class Chosen(Compared):
    """Keep, as bits, which source values a scattered ``amax`` or ``amin`` chose.

    The recompute reduces only these of its own values. A place that chose none keeps its value.
    """

    def __init__(self, inplace: bool = False) -> None:
        self.inplace = inplace

    def _source(self, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the source, and for each of its values the index into the dimension."""
        _, dim, index, source = args[:4]
        if index.dim() < source.dim():  # the index selects whole slices
            index = index.view([-1 if d == dim % source.dim() else 1 for d in range(source.dim())]).expand_as(source)
        return source[tuple(slice(n) for n in index.shape)], index

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        if args[4] not in _LOWEST or not out.is_floating_point() or not out.dim():
            return None
        source, index = self._source(args)
        return _bits(source.eq(out.gather(args[1], index)).logical_or_(source.isnan()))

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        x, dim, _, _, reduce = args
        source, index = self._source(args)
        lowest = _LOWEST[reduce]
        out = x.scatter_reduce(dim, index, source.where(kept.decode(), lowest), reduce, include_self=False)
        out = x.where(out == lowest, out)
        return x.copy_(out) if self.inplace else out


class ChosenOfSegments(Compared):
    """A form like :class:`Chosen` for ``segment_reduce``."""

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        if args[1] not in _LOWEST:
            return None
        known = {name: x for name, x in (kwargs or {}).items() if name in ("lengths", "offsets", "axis", "initial")}
        shares = torch.ops.aten._segment_reduce_backward(torch.ones_like(out), out, args[0], args[1], **known)
        return _bits(shares != 0)

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        data, reduce = args
        return torch.ops.aten.segment_reduce(data.where(kept.decode(), _LOWEST[reduce]), reduce, **(kwargs or {}))


#: The value that loses to every other value.
_LOWEST = {"amax": -math.inf, "amin": math.inf, "max": -math.inf, "min": math.inf}


def _bits(mask: torch.Tensor) -> tuple[Any, int]:
    payload = encode(mask, "mask")
    return payload, payload.nbytes


class OfFloats(Indices):
    """Keep counts of floating values, and places found by their zeros.

    A call on integers runs again.
    """

    @staticmethod
    def is_discrete(args: Args) -> bool:
        return any(x.is_floating_point() or x.is_complex() for x in args if isinstance(x, torch.Tensor))

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        return super().keep(args, kwargs, out) if self.is_discrete(args) else None


class Written:
    """Keep what the operator writes into its arguments, which is also what it returns."""

    def __init__(self, op: Any) -> None:
        self.at = [(i, a.name) for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def _arguments(self, args: Args, kwargs: Kwargs | None) -> tuple[torch.Tensor, ...]:
        return tuple(argument(args, kwargs or {}, i, name, None) for i, name in self.at)

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
    """Keep the slopes of ``rrelu``: the drawn one for each value, or 1.

    It draws for negative values only.
    """

    def __init__(self, inplace: bool) -> None:
        self.inplace = inplace

    def keep(self, args: Args, kwargs: Kwargs | None, out: Any) -> tuple[Any, int] | None:
        if not argument(args, kwargs or {}, 4, "training", False):
            return None
        kept = args[1].clone()
        return kept, kept.nbytes

    def give(self, kept: Any, args: Args, kwargs: Kwargs | None) -> Any:
        args[1].copy_(kept)
        return args[0].mul_(kept) if self.inplace else args[0] * kept
