"""Checkpoints in host memory or on a disk: ``offload=``.

The inputs of a region are saved under saved-tensor hooks, for host memory torch's ``save_on_cpu``;
tensors saved inside it are not, since a checkpoint adds its own hooks there. Compressed inputs move
as payloads: they are compressed first, then copied.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
import weakref
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
    """The bytes of a payload, which are in a store."""

    stored: _C.StoredBytes
    nbytes: int
    device: torch.device


class _Kept(NamedTuple):
    """What stays where it is; torch checks no version under hooks."""

    tensor: torch.Tensor
    version: int | None


#: By process, since threads end with it, and settings; the latest one stays open between steps.
_stores: weakref.WeakValueDictionary[tuple[int, Offload], _C.ByteStore] = weakref.WeakValueDictionary()
_latest: list[_C.ByteStore] = []
_lock = threading.Lock()


def store_of(offload: Offload) -> _C.ByteStore:
    """Return the store of these settings, which all regions of the process share.

    Raises:
        ValueError: The directory cannot be used.
    """
    with _lock:
        key = os.getpid(), offload
        store = _stores.get(key)
        if store is None:
            store = _C.ByteStore(str(offload.directory), int(offload.host_budget), offload.prefetch)
            _stores[key] = store
        _latest[:] = [store]
        return store


@functools.cache
def _say(why: str) -> None:
    warnings.warn(
        f"gradckpt: offload='disk' keeps payloads in memory from here on: {why}; pass another directory or "
        "host_budget, as in gradckpt.Offload('disk', host_budget='4GiB')",
        GradckptInactiveWarning,
        stacklevel=2,
    )


def _pack(offload: Offload, x: torch.Tensor) -> _Kept | _OnDisk:
    """Move what is the bytes of a payload; all else stays: arguments that are not compressed, which
    other regions or the model hold, too.
    """
    plain = type(x) is torch.Tensor and x.dtype is torch.uint8 and x.dim() == 1 and x.is_contiguous()
    if plain and x.numel() >= offload.min_bytes and x.device.type != "meta":  # type: ignore[operator]
        memory = x.detach().to("cpu")
        stored = store_of(offload).put(memory.data_ptr(), memory.numel())
        if not isinstance(stored, str):
            return _OnDisk(stored, x.numel(), x.device)
        _say(stored)
    return _Kept(x.detach(), None if x.is_inference() else x._version)


def _unpack(kept: _Kept | _OnDisk) -> torch.Tensor:
    if isinstance(kept, _Kept):
        if kept.version is not None and kept.tensor._version != kept.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{kept.tensor.type()} {list(kept.tensor.shape)}] is at version {kept.tensor._version}; expected "
                f"version {kept.version} instead."
            )
        return kept.tensor
    x = torch.empty(kept.nbytes, dtype=torch.uint8, device="cpu")
    if type(x) is not torch.Tensor:
        raise RuntimeError(
            "gradckpt: a payload on a disk cannot come back while a mode makes other tensors (FakeTensorMode); run "
            "the backward outside of it"
        )
    kept.stored.get(x.data_ptr())
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
    """Run :func:`of_layer` with the inputs in another place. On a disk they are payloads, raw ones
    if nothing else is asked for.
    """
    if offload.place == "disk" and kwargs.get("compress") is None:
        kwargs["compress"] = "raw"
    with to_place(offload):
        return of_layer(function, *args, **_inputs_alone(kwargs))


def region_at(offload: Offload | None) -> Callable[..., Any]:
    """Return ``gradckpt.checkpoint``, with the inputs in this place."""
    return checkpoint if offload is None else functools.partial(offloaded, offload)


def offloaded_stock(offload: Offload, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run ``torch.utils.checkpoint.checkpoint`` with the inputs in another place."""
    with to_place(offload):
        return torch_checkpoint(function, *args, **(_inputs_alone(kwargs) if hooks_see_kept else kwargs))
