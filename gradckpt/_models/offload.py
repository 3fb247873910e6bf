"""Checkpoints in host memory: ``offload=True`` works as in transformers.

The inputs of a region are saved under torch's ``save_on_cpu``; tensors saved inside it are not,
since a checkpoint adds its own hooks there. Compressed inputs move as payloads: they are compressed
first, then copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gradckpt._C import checkpoint
from gradckpt._engine.arguments import unbound
from gradckpt._engine.torch_private import hooks_see_kept


def to_host() -> save_on_cpu:
    """Return torch's context, with pinned memory if a device can copy from it.

    transformers always asks for pinned memory, which torch rejects without a device.
    """
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return save_on_cpu()
    return save_on_cpu(pin_memory=True, device_type=device.type)


def of_layer(function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Run ``gradckpt.checkpoint`` on a layer whose keywords are bound."""
    function, tensors = unbound(function)
    return checkpoint(function, *args, **options, **tensors)


def _inputs_alone(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a region of which a policy's outputs stay on the device."""
    chosen = "policy" in kwargs or "context_fn" in kwargs
    return {"respect_saved_tensors_hooks": False, **kwargs} if chosen else kwargs


def offloaded(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run :func:`of_layer` with the inputs in host memory."""
    with to_host():
        return of_layer(function, *args, **_inputs_alone(kwargs))


def offloaded_stock(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run ``torch.utils.checkpoint.checkpoint`` with the inputs in host memory."""
    with to_host():
        return torch_checkpoint(function, *args, **(_inputs_alone(kwargs) if hooks_see_kept else kwargs))
