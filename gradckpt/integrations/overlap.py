"""Modules that are checkpointed twice: what else checkpoints a block, beside us.

FSDP's own flag, in accelerate, Lightning or the Trainer, puts torch's ``CheckpointWrapper`` around blocks, before or
after a user has given them ours. Each layer would then run three times, and the wrong one of the two would say how.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.nn import Module

__all__ = ["block_of", "check_around", "is_wrapper"]

#: Where those that wrap one module keep it: torch's activation wrappers, FSDP, torch.compile.
_INSIDE = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")

_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def is_wrapper(module: Module) -> bool:
    """A ``CheckpointWrapper``: torch's, ours or a third."""
    return any(each.__name__ == "CheckpointWrapper" for each in type(module).__mro__)


def block_of(module: Module) -> Iterator[Module]:
    """The module, what it wraps, what that wraps, and so on: names of one block."""
    while True:
        yield module
        held = vars(module).get("_modules", {})
        inner = next((held[name] for name in _INSIDE if isinstance(held.get(name), Module)), None)
        if inner is None:
            return
        module = inner


def check_around(module: Module, how: str, way_out: str) -> None:
    """In a call of ``module``: it is not inside a call of torch's own ``CheckpointWrapper``.

    Raises:
        ValueError: it is.
    """
    library = sys.modules.get(_WRAPPER)
    if library is None:
        return
    code = library.CheckpointWrapper.forward.__code__  # ours has a forward of its own
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            outer: Any = frame.f_locals["self"]
            *_, block = block_of(outer)
            where, out = "it", ""
            if block is not module:
                where, out = f"the {type(block).__name__} that holds it", way_out
            raise ValueError(
                f"gradckpt: this {type(module).__name__} is checkpointed by {how}, and torch's CheckpointWrapper is "
                f"around {where} (FSDP's own activation_checkpointing flag makes it), so that it would run three "
                f"times; turn that flag off{out}"
            )
        frame = frame.f_back
