"""Says so when our keys went to torch's checkpoint, and so to layers that swallow them.

``model.gradient_checkpointing_enable({"compress": "int8", "use_reentrant": False})`` on a model that was not enabled
reaches no code of ours. But an optimizer steps after it, and torch lets anybody listen to that. So after each of the
first steps of an optimizer the checkpointing functions that are alive are looked at, in some hundredths of a second.
Nothing is listened to until transformers is imported. The listener stays, since torch goes through its hooks by an
iterator that a removal breaks; after a few optimizers it does nothing.
"""

from __future__ import annotations

import functools
import gc
import weakref
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradckpt.config import warn_inactive
from gradckpt.integrations.kwargs import MARKS
from gradckpt.patched import in_force

#: Steps of one optimizer that are looked at: another model has another one.
STEPS = 2

#: Of all of them. Some trainings have an optimizer for each parameter.
LOOKS = 8

#: Where torch's checkpoint is, and transformers' offload around it.
_STOCK = ("torch.utils.checkpoint", "transformers.modeling_utils")


class _Listener:
    """A hook of every optimizer's step."""

    def __init__(self) -> None:
        self.looks: list[weakref.ref[Any]] = []  # whose steps they were
        self.said = False
        self.registered = False

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self.said or len(self.looks) >= LOOKS or in_force():
            return  # under patched() such layers do compress, as it says and not as the key does
        if sum(look() is optimizer for look in self.looks) >= STEPS:
            return
        self.looks.append(weakref.ref(optimizer))
        key = _stray()
        if key is not None:
            self.said = True
            warn_inactive(
                f"a model that is not enabled was given {key}= in its gradient_checkpointing_enable(); torch's "
                "checkpoint does not know the key and its layers swallow it, so nothing is compressed; call "
                "gradckpt.enable(model) first",
            )


def _stray() -> str | None:
    """One of our keys that a living function of torch's checkpointing holds."""
    for thing in gc.get_objects():
        if type(thing) is functools.partial and getattr(thing.func, "__module__", None) in _STOCK:
            key = next((key for key in MARKS if key in thing.keywords), None)
            if key is not None:
                return key
    return None


_listener = _Listener()


def listen(_: ModuleType) -> None:
    """Once transformers is there; again: does nothing."""
    if not _listener.registered:
        _listener.registered = True
        register_optimizer_step_post_hook(_listener)
