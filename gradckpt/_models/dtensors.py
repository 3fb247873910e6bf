"""DTensors among the inputs of a region (tensor and sequence parallelism): the local shard is
compressed.

The region gets the shard and makes the DTensor from it again. Both steps are differentiable. An
unfinished collective (``AsyncCollectiveTensor``, which parallel layers return) is waited for.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from gradckpt._engine import torch_private as private
from gradckpt._engine.buffers import Calling


@dataclasses.dataclass(slots=True, eq=False)
class _Remade(Calling):
    """A function that gets the shards of its DTensors."""

    remake: dict[int, Callable[[Any], Any]]  # by the place among the leaves of the arguments

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = private.tree_flatten((args, kwargs))
        for place, of_shard in self.remake.items():
            leaves[place] = of_shard(leaves[place])
        args, kwargs = private.tree_unflatten(leaves, tree)
        return self.function(*args, **kwargs)


class _Arrived(torch.autograd.Function):
    """Wait for an AsyncCollectiveTensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.wait()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def localized(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], leaves_too: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return these three with each DTensor replaced by its shard, or unchanged without one to
    compress.

    Such a DTensor requires grad, was computed (or ``leaves_too``) and is not a partial sum, whose
    shards are not parts of its value.
    """
    library = sys.modules.get("torch.distributed.tensor")
    if library is None:
        return function, args, kwargs
    late = sys.modules["torch.distributed._functional_collectives"].AsyncCollectiveTensor
    if not _holds((*args, *kwargs.values()), (library.DTensor, late)):
        return function, args, kwargs
    leaves, tree = private.tree_flatten((args, kwargs))
    remake: dict[int, Callable[[Any], Any]] = {}
    changed = False
    for place, x in enumerate(leaves):
        if type(x) not in (library.DTensor, late) or not x.requires_grad or not (leaves_too or x.grad_fn is not None):
            continue
        if type(x) is library.DTensor:
            if any(placement.is_partial() for placement in x.placements):
                continue
            remake[place] = functools.partial(
                library.DTensor.from_local,
                device_mesh=x.device_mesh,
                placements=x.placements,
                run_check=False,
                shape=x.shape,
                stride=x.stride(),
            )
            x = x.to_local()
        leaves[place] = _Arrived.apply(x) if type(x) is late else x  # type: ignore[no-untyped-call]
        changed = True
    if not changed:
        return function, args, kwargs
    args, kwargs = private.tree_unflatten(leaves, tree)
    return _Remade(function, remake) if remake else function, args, kwargs


def _holds(values: Any, kind: tuple[type, ...]) -> bool:
    for value in values:
        if isinstance(value, kind):
            return True
        if type(value) in (tuple, list, dict) and _holds(value.values() if type(value) is dict else value, kind):
            return True
    return False
