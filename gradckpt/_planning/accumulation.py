"""Sums of gradients that autograd makes in place: :func:`accumulates_in_place`.

Where a tensor has several uses, autograd's engine adds their gradients, in place if nothing else
holds the first one. Under a dispatch mode it never does, so a mode has to tell where it would.
"""

from __future__ import annotations

import functools
import re
import sys
from types import FrameType
from typing import Any

import torch

from gradckpt._engine import torch_private as private

__all__ = ["accumulates_in_place", "uses_of_one"]

aten = torch.ops.aten

#: Files of a mode's handler, and of torch that keep Dynamo away from it.
_WRAPS_HANDLERS = re.compile(r"(torch.(_compile\.py|_dynamo.eval_frame\.py)|_planning.paper\.py)$")


def accumulates_in_place(func: Any, args: Any) -> bool:
    """Return whether an operator is a sum that the engine would make in its first operand, outside
    of a dispatch mode. To be called by ``__torch_dispatch__``.
    """
    if func is not aten.add.Tensor or private.graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    old = args[0]
    return (
        _is_dense(old)
        and private.storage_uses(old.untyped_storage()._cdata) <= 2  # the tensor, and the storage in Python
        and old._use_count() <= uses_of_one()
        and _is_of_the_engine(sys._getframe(1))
    )


def _is_dense(x: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.size(), strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_of_the_engine(frame: FrameType | None) -> bool:
    """Return whether no Python function runs between the engine and the mode's handler."""
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or _WRAPS_HANDLERS.search(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


class _Counting(private.TorchDispatchMode):  # type: ignore[misc]
    uses = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor:
            self.uses = args[0]._use_count()
        return func(*args, **(kwargs or {}))


@functools.cache
def uses_of_one() -> int:
    """Return the count of uses that a mode sees of a gradient which the engine alone holds. To be
    called outside of a backward.
    """
    with private.without_modes(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        loss = torch.stack([y.sin(), y.cos()]).sum()
        with _Counting() as mode:
            torch.autograd.grad(loss, x)
    uses: int = mode.uses
    return uses
