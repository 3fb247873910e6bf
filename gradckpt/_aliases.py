"""Called by the engine when a region wrote to one of its arguments: does another argument share that memory, and does
the caller see the write?"""

from __future__ import annotations

import itertools
from typing import Any

import torch

#: An argument, what the function got for it, the payload that is kept of it or None, and the version it had (-1: none).
Row = tuple[torch.Tensor, torch.Tensor, Any, int]


def check(rows: list[Row]) -> None:
    """Raises:
    RuntimeError: a write reached two arguments, one of which will be restored by itself.
    """
    for i, (x, fed, packed, version) in enumerate(rows):
        if version < 0 or fed._version == version:
            continue
        for j, (other, _, other_packed, _) in enumerate(rows):
            if i != j and (packed or other_packed) and overlap(x, other):
                raise RuntimeError(
                    "gradckpt: a region changes an argument in place (or a view of it) that shares memory with "
                    f"another of its arguments, of shapes {list(x.shape)} and {list(other.shape)}; compressed, each "
                    "is restored by itself, and the recompute would not see the change in the other; clone one of "
                    "them, or do without the write"
                )


def write_back(rows: list[Row]) -> None:
    """What a region wrote to the fake-quantized stand-in of an argument is written to the argument.

    Raises:
        RuntimeError: the stand-in has another shape or other strides now, which nobody can copy.
    """
    for x, fed, _, version in rows:
        if fed is x or fed._version == version:
            continue
        if fed.shape != x.shape or fed.dtype != x.dtype:
            raise RuntimeError(
                f"gradckpt: a region with replay=True changed the shape of its input in place, {list(x.shape)} to "
                f"{list(fed.shape)}; clone the input first"
            )
        x.copy_(fed)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Is there an element of both? Of layouts that no slicing of a contiguous tensor makes: True, when unsure."""
    if a.numel() == 0 or b.numel() == 0 or not _one_storage(a, b):
        return False
    if a.data_ptr() > b.data_ptr():
        a, b = b, a
    offset, rest = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    if offset > sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)):
        return False
    if rest or a.element_size() != b.element_size():
        return True
    return _boxes_overlap(_sizes(a), _sizes(b), offset)


def _one_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # subclasses without one
        return False


def _sizes(x: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that move."""
    return [(s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1 and s > 0]


def _boxes_overlap(a: list[tuple[int, int]], b: list[tuple[int, int]], offset: int) -> bool:
    """``b`` begins ``offset`` elements after ``a``. The strides of both are the weights of digits; each tensor is a
    box of digits, and boxes meet where the intervals of all digits do."""
    strides = sorted({stride for stride, _ in (*a, *b)}, reverse=True)
    sizes_a, sizes_b = dict(a), dict(b)
    if len(sizes_a) < len(a) or len(sizes_b) < len(b):
        return True
    if any(wide % narrow for wide, narrow in itertools.pairwise(strides)):
        return True
    outer, apart = 0, False
    for stride in strides:
        begin, offset = divmod(offset, stride)
        size_a, size_b = sizes_a.get(stride, 1), sizes_b.get(stride, 1)
        if outer and max(size_a, begin + size_b) > outer // stride:
            return True  # carries into the digit before: no box
        apart |= begin >= size_a
        outer = stride
    return not (apart or offset)
