"""Checkpoints in host memory: what ``offload=True`` puts around them, as transformers does.

The inputs of a region are saved under torch's ``save_on_cpu``; what is saved inside it is not, since a
checkpoint puts hooks of its own around that. Compressed inputs travel as payloads: compressed first, copied then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt
from gradckpt.arguments import unbound


def _to_host() -> save_on_cpu:
    """Pinned where there is a device to copy from; transformers asks for pinned memory anyway, which torch
    without a device refuses."""
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return save_on_cpu()
    return save_on_cpu(pin_memory=True, device_type=device.type)


def of_layer(function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """``gradckpt.checkpoint`` of a layer whose keywords are bound."""
    function, tensors = unbound(function)
    return gradckpt.checkpoint(function, *args, **options, **tensors)


def offloaded(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The same with its inputs in host memory."""
    with _to_host():
        return of_layer(function, *args, **kwargs)


def offloaded_stock(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint``."""
    with _to_host():
        return torch_checkpoint(function, *args, **kwargs)
