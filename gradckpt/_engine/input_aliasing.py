"""Checks after a region wrote to one of its arguments: whether another argument shares that memory,
and whether the caller sees the write.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

#: An argument, what the function got for it, the payload that holds it or None, and its version
#: (-1: none).
Row = tuple[torch.Tensor, torch.Tensor, Any, int]


def check(rows: list[Row]) -> None:
    """Check that no write reached an argument that is restored separately.

    Raises:
        RuntimeError: a write reached two arguments, one of which is restored from a payload.
    """
    for i, (x, fed, packed, version) in enumerate(rows):
        if version < 0 or fed._version == version:
            continue
        for j, (other, _, other_packed, _) in enumerate(rows):
            if i != j and (packed or other_packed) and overlap(x, other):
                raise RuntimeError(
                    "gradckpt: a compressed region writes in place to an argument that shares memory with another, of "
                    f"shapes {list(x.shape)} and {list(other.shape)}; clone one of them"
                )


def check_and_write_back(rows: list[Row]) -> None:
    """Check all writes, then copy what a region wrote to the fake-quantized replacement of an
    argument to the argument.

    Raises:
        RuntimeError: as :func:`check`; or the replacement's shape or dtype changed, so it cannot
            be copied.
    """
    check(rows)
    for x, fed, _, version in rows:
        if fed is x or fed._version == version:
            continue
        if fed.shape != x.shape or fed.dtype != x.dtype:
            raise RuntimeError(
                "gradckpt: a region with fake_quantize=True changed the shape of its input in place, "
                f"{list(x.shape)} to {list(fed.shape)}; clone the input first"
            )
        x.copy_(fed)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the tensors share an element.

    For layouts that no slicing of a contiguous tensor makes, it returns True when unsure.
    """
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
    except (RuntimeError, NotImplementedError):  # subclasses without a storage
        return False


def _sizes(x: torch.Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of the dimensions with more than one element and a nonzero stride."""
    return [(s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1 and s > 0]


def _boxes_overlap(a: list[tuple[int, int]], b: list[tuple[int, int]], offset: int) -> bool:
    """Return whether two layouts share an element; ``b`` begins ``offset`` elements after ``a``.

    The strides of both are the weights of digits. Each tensor is a box of digits, and two boxes
    meet where the intervals of all digits do.
    """
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
            return True  # it carries into the digit before, so it is not a box
        apart |= begin >= size_a
        outer = stride
    return not (apart or offset)
