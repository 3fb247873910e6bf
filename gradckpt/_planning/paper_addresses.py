"""The addresses of tensors on paper, of which no memory is ever touched: :func:`shared_space`.

All modes share them and take them in turn: there is room for few such spaces, and what a step keeps
must not lie where a later one puts its tensors.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from typing import Any

import torch

from gradckpt._planning.operator_parts import has_rules

__all__ = ["bounds", "shared_space", "take", "tensors_on_paper"]

_ADDRESSES = 2**44
_ALIGNMENT = 64
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13


class _Mapped(mmap.mmap):
    """What reads one of them by mistake finds zeros."""

    first = next = 0


class _Unmapped(ctypes.c_byte * _ADDRESSES):  # type: ignore[misc]
    """Addresses that the system does not give away, for a process that may not have so large
    a mapping (``ulimit -v``, strict overcommitting).
    """

    first = next = 0


def _unused(size: int) -> int:
    """Return the address of so many bytes in the middle of the largest gap between mappings, to
    whose ends the system adds new ones.
    """
    with open("/proc/self/maps") as file:
        bounds = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in file]
    ends = [end for _, end in bounds if end < 2**47]
    gaps = [(start - end, end) for end, (start, _) in zip([2**32, *ends], bounds, strict=False) if start < 2**47]
    length, first = max(gaps)
    if length < 2 * size:
        raise OSError("gradckpt: this process has no addresses for a step on paper; plan in another one")
    return first + (length - size) // 2 // mmap.PAGESIZE * mmap.PAGESIZE


_spaces: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def shared_space() -> Any:
    """Return the addresses that all tensors on paper take in turn."""
    space: Any = _spaces.get("")
    if space is None:
        try:
            space = _Mapped(-1, _ADDRESSES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError:
            space = _Unmapped.from_address(_unused(_ADDRESSES))
        space.first = torch.frombuffer(space, dtype=torch.uint8, count=1).data_ptr()
        _spaces[""] = space
    return space


def take(space: Any, nbytes: int) -> Any:
    """Return a storage of so many bytes, which keeps the space."""
    if space.next + nbytes > _ADDRESSES:
        space.next = 0
    whole = torch.frombuffer(space, dtype=torch.uint8, count=nbytes, offset=space.next)
    space.next += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return whole.untyped_storage()


def bounds(space: Any) -> tuple[int, int]:
    """Return the first address, and that after the last one."""
    return space.first, space.first + _ADDRESSES


def tensors_on_paper() -> list[torch.Tensor]:
    """Return the tensors that Python knows and that have no values."""
    if (space := _spaces.get("")) is None:
        return []
    first, end = bounds(space)
    found = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not has_rules(type(x)))
    return [x for x in found if x.device.type == "cpu" and first <= _address(x) < end]


def _address(x: torch.Tensor) -> int:
    try:
        return int(x.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # a tensor without a storage
        return 0
