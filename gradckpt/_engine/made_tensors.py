"""What operators make while code runs, and which of it is still there: :class:`MadeTensors`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gradckpt._engine import torch_private as private
from gradckpt._engine.discrete import FORMS


class MadeTensors(private.TorchDispatchMode):  # type: ignore[misc]
    """Note the tensors that operators make, and operators that choose."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Any] = []
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FORMS:
            self.choices.append(func)
        result = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(x) for x in private.tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result

    def are_left(
        self, *known: torch.Tensor, of: Callable[[torch.Tensor], bool] = torch.Tensor.is_floating_point
    ) -> bool:
        """Return whether such a tensor is still there that shares no memory with a known one: an
        auxiliary loss, what a hook collects, what a module hands to another one.
        """
        memory = {x.untyped_storage()._cdata for x in known}

        def is_there() -> bool:
            alive = (x for each in self.made if (x := each()) is not None and of(x))
            return any(x.untyped_storage()._cdata not in memory for x in alive)

        if not is_there():
            return False
        gc.collect()
        return is_there()
