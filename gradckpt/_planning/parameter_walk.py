"""What each training call asks of a model's parameters, in one walk: :class:`ParameterWalk`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from gradckpt._planning import fsdp1
from gradckpt._planning.sharded import gradient_bytes_of, state_of

__all__ = ["Found", "ParameterWalk"]


class Found(NamedTuple):
    """``parameters``: of each the size, or 1 in FSDP1, which gathers it at times, and whether it is
    trained. ``gradients``: bytes of those that exist. ``reduces``: whether a backward reduces the
    gradients of a sharded model. ``changes``: how often modules were others.
    """

    parameters: list[tuple[int, bool]]
    gradients: int
    reduces: bool
    changes: int


class ParameterWalk:
    """Reads a model's parameters. Its modules are remembered until one has other children or, as
    when it is sharded, another class; what modules have of parameters is read each time.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[Module]] = []  # so that parts that are replaced are freed
        self._tree: Any = None
        self._state: Any = None
        self._changes = 0

    def read(self, model: Module) -> Found:
        modules: list[Any] = [module() for module in self._modules]
        if modules[:1] != [model] or None in modules or _tree_of(modules) != self._tree:
            modules = list(model.modules())
            self._modules = list(map(weakref.ref, modules))
            self._tree, self._state = _tree_of(modules), state_of(model)
            self._changes += 1
        elif isinstance(self._state, fsdp1.State):
            self._state = state_of(model)  # which drops gradients that zero_grad() cannot reach
        registered = [p for module in modules for p in module._parameters.values() if p is not None]
        parameters = dict(zip(map(id, registered), registered, strict=True)).values()  # tied ones once
        size: Callable[[Tensor], int] = attrgetter("nbytes")
        if isinstance(self._state, fsdp1.State):
            size = _one
        elif self._state.parameters:  # gathered ones may have another dtype
            size = Tensor.numel
        return Found(
            [(size(p), p.requires_grad) for p in parameters],
            gradient_bytes_of(parameters, self._state),
            self._state.reduces(),
            self._changes,
        )


def _one(_: Tensor) -> int:
    return 1


def _tree_of(modules: Sequence[Module]) -> tuple[list[int], list[type]]:
    """Return the ids of all children, and the class of each module."""
    children = [id(x) for module in modules if (table := module._modules) for x in table.values()]
    return children, list(map(type, modules))
