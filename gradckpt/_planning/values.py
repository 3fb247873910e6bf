"""What a step on paper must not do: read values that tensors lack, or change parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["ELSEWHERE", "RECURRENT", "NotOnPaper", "ReadsRefused", "StepWrites"]

#: Why a step cannot run on paper.
READS = "it reads values"
RECURRENT = "the size of what it keeps is unknown"
ELSEWHERE = "it ran in another thread"

#: Methods that read a tensor's memory without an operator.
_READS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__}


class NotOnPaper(RuntimeError):
    """An operator needs the values of a tensor that has none, or cannot be run without values."""


class StepWrites(ValueError):
    """The step changes parameters."""

    def __init__(self) -> None:
        super().__init__("gradckpt: the step changed parameters; leave optimizer.step() out of it")


class ReadsRefused(TorchFunctionMode):
    """Refuse to read tensors without values past the dispatcher."""

    def __init__(self, has_values: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._has_values = has_values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not self._has_values(args[0]):
            raise NotOnPaper(f"{func.__name__}: {READS}")
        return func(*args, **(kwargs or {}))
