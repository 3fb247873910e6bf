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
class Comparison:
    """``total``: the relative L2 error over all parameters. ``not_finite``: a parameter whose
    gradient is infinite or NaN, or "". ``sums``: those of :func:`_sums`, over all parameters.
    """

    sums: tuple[float, ...]
    worst: tuple[tuple[str, float], ...]
    not_finite: str

    @property
    def total(self) -> float:
        error, exact, *_ = self.sums
        return math.sqrt(error / exact)

    @property
    def cosine(self) -> float:
        _, exact, found, product = self.sums
        norms = math.sqrt(exact * found)
        return max(-1.0, min(1.0, product / norms)) if norms else 0.0

    def scaled(self, factor: float) -> float:
        """Return ``total`` for gradients that are so many times as large."""
        _, exact, found, product = self.sums
        return math.sqrt(max(0.0, factor**2 * found - 2 * factor * product + exact) / exact)


class ExactGradients:
    """The gradients of a model's parameters, which it takes from them.

    A parameter without a gradient counts as one whose gradient is zero.

    Raises:
        ValueError: There are none, all are zero, or they are sharded.
    """

    def __init__(self, model: Module) -> None:
        self._gradients: dict[str, Tensor] = {}
        self.not_finite, scale = "", 0.0
        for name, gradient in _taken(model):
            if hasattr(gradient, "to_local"):
                raise ValueError(
                    f"gradckpt: the gradient of {name} is a shard (DTensor); measure before fully_shard(model), or one "
                    "rank's copy"
                )
            square = float(_sums(gradient, gradient)[1])
            self.not_finite = self.not_finite or ("" if math.isfinite(square) else name)
            scale += square
            # A view lies in memory that the next run may write, as in DistributedDataParallel's.
            self._gradients[name] = gradient.to("cpu", copy=gradient._is_view())
        if not scale:
            raise ValueError("gradckpt: all exact gradients are zero, so errors have no scale; use another batch")

    def compare(self, model: Module) -> Comparison:
        """Compare the gradients of the model's parameters, which become None."""
        by_name = {name: _sums(self._gradients.get(name), gradient) for name, gradient in _taken(model)}
        by_name |= {name: _sums(exact, None) for name, exact in self._gradients.items() if name not in by_name}
        total = sum(by_name.values(), torch.zeros(4, dtype=torch.float64, device="cpu")).tolist()
        not_finite = next((name for name, sums in by_name.items() if not sums[1:3].isfinite().all()), "")
        each = ((name, *sums.tolist()) for name, sums in by_name.items())
        worst = [
            (name, math.sqrt(error / exact))
            for name, error, exact, *_ in each
            if exact > _NOISE**2 * total[1] and error
        ]
        return Comparison(tuple(total), tuple(sorted(worst, key=lambda each: -each[1])[:_WORST]), not_finite)


def _taken(model: Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            yield name, gradient


def _sums(exact: Tensor | None, found: Tensor | None) -> Tensor:
    """Return the sums for one parameter, of exact gradients e and found ones f: of (f - e)^2, e^2,
    f^2 and e f; in pieces, on the device of the found gradient.
    """
    either = exact if found is None else found
    assert either is not None
    total = torch.zeros(4, dtype=torch.float64, device=either.device)
    for e, f in zip(_pieces(exact, either), _pieces(found, either), strict=True):
        f = f.to(either.device, torch.float64, copy=True).reshape(-1)
        e = e.to(either.device).to(torch.float64).reshape(-1)
        products = [e.dot(e), f.dot(f), e.dot(f)]
        f -= e
        total += torch.stack([f.dot(f), *products])
    return total.cpu()


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
