"""Modules that are checkpointed twice: other checkpoints of a block beside ours.

FSDP's own flag, in accelerate, Lightning or the Trainer, puts torch's ``CheckpointWrapper`` around
blocks, before or after the user enables ours. Each layer would then run three times, with the
settings of the wrong one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from gradckpt._engine.user_lines import outwards

#: The attribute in which a wrapper of one module holds it: torch's activation wrappers, FSDP,
#: torch.compile.
_INSIDE = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")

_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def is_wrapper(module: Module) -> bool:
    """Return whether this is a ``CheckpointWrapper``: torch's, ours or another."""
    return any(each.__name__ == "CheckpointWrapper" for each in type(module).__mro__)


def block_of(module: Module) -> Iterator[Module]:
    """Yield the module, the module that it wraps, and so on: all names of one block."""
    while True:
        yield module
        held = vars(module).get("_modules", {})
        inner = next((held[name] for name in _INSIDE if isinstance(held.get(name), Module)), None)
        if inner is None:
            return
        module = inner


def check_around(module: Module, how: str, way_out: str) -> None:
    """Check in a call of ``module`` that it is not inside a call of torch's own
    ``CheckpointWrapper``.

    Raises:
        ValueError: It is.
    """
    library = sys.modules.get(_WRAPPER)
    if library is None:
        return
    code = library.CheckpointWrapper.forward.__code__  # ours has its own forward
    for frame in outwards(sys._getframe(1)):
        if frame.f_code is code:
            outer: Any = frame.f_locals["self"]
            *_, block = block_of(outer)
            where, out = "again", ""
            if block is not module:
                where, out = f"the {type(block).__name__} around it", way_out
            raise ValueError(
                f"gradckpt: {type(module).__name__} would run three times, checkpointed by {how} and {where} by "
                "torch's CheckpointWrapper; leave out apply_activation_checkpointing or FSDP's "
                f"activation_checkpointing flag{out}"
            )
