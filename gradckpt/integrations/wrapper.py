"""torch's ``CheckpointWrapper`` around modules, with gradckpt inside: :func:`checkpoint_wrapper`.

FSDP, accelerate, Lightning and torchtitan know that class and its ``_checkpoint_wrapped_module.`` prefix, which
names of parameters and state dicts do not show.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as TorchsWrapper
from torch.nn import Module

import gradckpt
from gradckpt.apply import TAKEN, parse_options
from gradckpt.config import Compress

__all__ = ["CheckpointWrapper", "checkpoint_wrapper"]


class CheckpointWrapper(TorchsWrapper):
    """A module, each training call of which is one region of :func:`gradckpt.checkpoint`."""

    def __init__(self, module: Module, settings: dict[str, Any]) -> None:
        super().__init__(module, CheckpointImpl.NO_REENTRANT, gradckpt.checkpoint, **settings)
        self.settings = settings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self._checkpoint_wrapped_module
        if kwargs and not TAKEN.isdisjoint(kwargs):  # the module has a keyword of checkpoint's name
            module = functools.partial(module, **{key: kwargs.pop(key) for key in TAKEN & kwargs.keys()})
        return self.checkpoint_fn(module, *args, **kwargs)


def checkpoint_wrapper(module: Module, compress: Compress = "int8", **options: Any) -> CheckpointWrapper:
    """Wraps a module for activation checkpointing with compressed inputs.

    Args:
        module: Any module.
        compress: ``None`` (torch's checkpointing, bit for bit), ``True``, a codec's name, a
            :class:`gradckpt.CompressionConfig` or its dict.
        **options: ``policy`` or ``context_fn``, ``preserve_rng_state``, ``early_stop``, ``determinism_check``,
            ``debug`` and ``buffers``, as for :func:`gradckpt.checkpoint`.

    Raises:
        ValueError: unknown codec or option; a module that is wrapped already.
        TypeError: not a module.
    """
    if not isinstance(module, Module):
        raise TypeError(f"gradckpt: checkpoint_wrapper() takes a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, TorchsWrapper):
        raise ValueError("gradckpt: this module is wrapped for checkpointing already; wrap it once")
    return CheckpointWrapper(module, parse_options({"compress": compress, **options}, {}))
