"""The gradients of one run in host memory, and how far those of another run are from them:
:class:`ExactGradients`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Module

#: The number of values that are converted to float64 at a time.
_CHUNK = 2**16

#: Parameters with a smaller share of the gradient's norm have rounding noise alone.
_NOISE = 1e-6

#: The number of parameters in ``worst``.
_WORST = 5


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Sums over the values of one parameter or of all, of exact gradients e and found ones f."""

    error: float = 0.0  # of (f - e)^2
    exact: float = 0.0  # of e^2
    found: float = 0.0  # of f^2
    product: float = 0.0  # of e f

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @property
    def finite(self) -> bool:
        return math.isfinite(self.exact) and math.isfinite(self.found)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """``total``: the relative L2 error over all parameters. ``not_finite``: a parameter whose
    gradient is infinite or NaN, or "".
    """

    sums: _Sums
    worst: tuple[tuple[str, float], ...]
    not_finite: str

    @property
    def total(self) -> float:
        return math.sqrt(self.sums.error / self.sums.exact)

    @property
    def cosine(self) -> float:
        norms = math.sqrt(self.sums.exact * self.sums.found)
        return max(-1.0, min(1.0, self.sums.product / norms)) if norms else 0.0

    def scaled(self, factor: float) -> float:
        """Return ``total`` for gradients that are so many times as large."""
        s = self.sums
        return math.sqrt(max(0.0, factor**2 * s.found - 2 * factor * s.product + s.exact) / s.exact)


class ExactGradients:
    """The gradients of a model's parameters, which it takes from them.

    A parameter without a gradient counts as one whose gradient is zero.

    Raises:
        ValueError: There are none, all are zero, or they are sharded.
    """

    def __init__(self, model: Module) -> None:
        self._gradients: dict[str, Tensor] = {}
        self.not_finite, total = "", _Sums()
        for name, gradient in _taken(model):
            if hasattr(gradient, "to_local"):
                raise ValueError(
                    f"gradckpt: the gradient of {name} is a shard (DTensor); measure before fully_shard(model), or one "
                    "rank's copy"
                )
            sums = _sums(gradient, gradient)
            self.not_finite = self.not_finite or ("" if sums.finite else name)
            total += sums
            # A view lies in memory that the next run may write, as in DistributedDataParallel's.
            self._gradients[name] = gradient.to("cpu", copy=gradient._is_view())
        if not total.exact:
            raise ValueError("gradckpt: all exact gradients are zero, so errors have no scale; use another batch")

    def compare(self, model: Module) -> Comparison:
        """Compare the gradients of the model's parameters, which become None."""
        by_name = {name: _sums(self._gradients.get(name), gradient) for name, gradient in _taken(model)}
        by_name |= {name: _sums(exact, None) for name, exact in self._gradients.items() if name not in by_name}
        total = sum(by_name.values(), _Sums())
        not_finite = next((name for name, sums in by_name.items() if not sums.finite), "")
        worst = [
            (name, math.sqrt(sums.error / sums.exact))
            for name, sums in by_name.items()
            if sums.exact > _NOISE**2 * total.exact and sums.error
        ]
        return Comparison(total, tuple(sorted(worst, key=lambda each: -each[1])[:_WORST]), not_finite)


def _taken(model: Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            yield name, gradient


def _sums(exact: Tensor | None, found: Tensor | None) -> _Sums:
    """Return the sums for one parameter, in pieces, on the device of the found gradient."""
    total: Tensor | None = None
    either = exact if found is None else found
    assert either is not None
    for e, f in zip(_pieces(exact, either), _pieces(found, either), strict=True):
        f = f.to(either.device, torch.float64, copy=True).reshape(-1)
        e = e.to(either.device).to(torch.float64).reshape(-1)
        products = [e.dot(e), f.dot(f), e.dot(f)]
        f -= e
        sums = torch.stack([f.dot(f), *products])
        total = sums if total is None else total + sums
    return _Sums() if total is None else _Sums(*total.tolist())


def _pieces(x: Tensor | None, like: Tensor) -> Iterator[Tensor]:
    """Yield parts of a gradient with few enough values; zeros for None."""
    if x is None:
        x = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.dim():
        yield x
        return
    rows = max(1, _CHUNK * x.size(0) // max(x.numel(), 1))
    yield from x.split(rows)
