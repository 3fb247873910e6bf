"""Says so when our keys went to torch's checkpoint, and so to layers that swallow them.

``model.gradient_checkpointing_enable({"compress": "int8", "use_reentrant": False})`` on a model that was not enabled
reaches no code of ours. But an optimizer steps after it, and torch lets anybody listen to that. So after each of the
first steps of the process the checkpointing functions that are alive are looked at, in some hundredths of a second.
Nothing is listened to until transformers is imported, nor afterwards.
"""

from __future__ import annotations

import functools
import gc
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradckpt.config import warn_inactive
from gradckpt.integrations.kwargs import MARKS

#: Optimizer steps that are looked at.
STEPS = 2


class _Listener:
    def __init__(self) -> None:
        self.steps = 0
        self.handle = register_optimizer_step_post_hook(self)

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.steps += 1
        key = _stray()
        if key is not None or self.steps >= STEPS:
            self.handle.remove()
        if key is not None:
            warn_inactive(
                f"a model was given {key}=... in gradient_checkpointing_enable() without being enabled: torch's "
                "checkpoint does not know the key, its layers swallow it, and nothing is compressed; call "
                "gradckpt.enable(model) first",
                stacklevel=3,
            )


def _stray() -> str | None:
    """One of our keys that a living function of torch's checkpointing holds."""
    for thing in gc.get_objects():
        if type(thing) is functools.partial and getattr(thing.func, "__module__", None) in _STOCK:
            key = next((key for key in MARKS if key in thing.keywords), None)
            if key is not None:
                return key
    return None


#: Of torch's checkpoint, and of transformers' offload around it.
_STOCK = ("torch.utils.checkpoint", "transformers.modeling_utils")


def listen(_: ModuleType) -> None:
    _Listener()
