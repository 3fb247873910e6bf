"""Checkpoints in host memory or on a disk: ``offload=``.

The inputs of a region are saved under saved-tensor hooks, for host memory torch's ``save_on_cpu``;
tensors saved inside it are not, since a checkpoint adds its own hooks there. Compressed inputs move
as payloads: they are compressed first, then copied.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gradckpt import _C
from gradckpt._C import checkpoint
from gradckpt._config import GradckptInactiveWarning
from gradckpt._engine.arguments import unbound
from gradckpt._engine.torch_private import hooks_see_kept
from gradckpt._offload import Offload

# ---- host memory


def _to_host() -> save_on_cpu:
    """Return torch's context, with pinned memory if a device can copy from it.

    transformers always asks for pinned memory, which torch rejects without a device.
    """
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return save_on_cpu()
    return save_on_cpu(pin_memory=True, device_type=device.type)


# ---- a disk


class _OnDisk(NamedTuple):
    """A tensor that is in a store."""

    stored: _C.StoredBytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    device: torch.device


@functools.cache
def store_of(offload: Offload) -> _C.ByteStore:
    """Return the store of these settings, which all regions share.

    Raises:
        ValueError: The directory cannot be used.
    """
    return _C.ByteStore(str(offload.directory), int(offload.host_budget), offload.prefetch)


@functools.cache
def _say(why: str) -> None:
    warnings.warn(
        f"gradckpt: offload='disk' keeps tensors in memory: {why}; free that, or raise host_budget of "
        "gradckpt.Offload (said once)",
        GradckptInactiveWarning,
        stacklevel=2,
    )


def _is_of_a_leaf(x: torch.Tensor) -> bool:
    """Return whether it is a parameter or a view of one, which exists anyway."""
    base = x if x._base is None else x._base
    return base.is_leaf and base.requires_grad


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor, uint8."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset()).view(torch.uint8)


def _pack(offload: Offload, x: torch.Tensor) -> torch.Tensor | _OnDisk:
    if x.numel() * x.element_size() < offload.min_bytes or type(x) is not torch.Tensor:  # type: ignore[operator]
        return x
    if x.layout is not torch.strided or x.device.type == "meta" or _is_of_a_leaf(x):
        return x
    with torch.no_grad():
        # A copy in the order of memory, where it has holes or shares values.
        dense = x.detach().to("cpu")
        if not torch.ops.aten.is_non_overlapping_and_dense(dense):
            dense = dense.clone(memory_format=torch.contiguous_format)
        memory = _bytes_of(dense.resolve_conj().resolve_neg())
    stored = store_of(offload).put(memory.data_ptr(), memory.numel())
    if isinstance(stored, str):
        _say(stored)
        return x
    return _OnDisk(stored, x.dtype, x.size(), dense.stride(), x.device)


def _unpack(kept: torch.Tensor | _OnDisk) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    with torch.no_grad():
        x = torch.empty_strided(kept.size, kept.stride, dtype=kept.dtype)
        kept.stored.get(_bytes_of(x).data_ptr())
        return x.to(kept.device)


# ---- regions


def to_place(offload: Offload) -> AbstractContextManager[Any]:
    """Return a context in which saved tensors go to this place."""
    if offload.place == "cpu":
        return _to_host()
    return saved_tensors_hooks(functools.partial(_pack, offload), _unpack)


def of_layer(function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Run ``gradckpt.checkpoint`` on a layer whose keywords are bound."""
    function, tensors = unbound(function)
    return checkpoint(function, *args, **options, **tensors)


def _inputs_alone(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a region of which a policy's outputs stay on the device."""
    chosen = "policy" in kwargs or "context_fn" in kwargs
    return {"respect_saved_tensors_hooks": False, **kwargs} if chosen else kwargs


def offloaded(offload: Offload, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run :func:`of_layer` with the inputs in another place."""
    with to_place(offload):
        return of_layer(function, *args, **_inputs_alone(kwargs))


def offloaded_stock(offload: Offload, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run ``torch.utils.checkpoint.checkpoint`` with the inputs in another place."""
    with to_place(offload):
        return torch_checkpoint(function, *args, **(_inputs_alone(kwargs) if hooks_see_kept else kwargs))
