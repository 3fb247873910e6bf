"""Python registrations of torch.ops.gradckpt.

They are fake implementations (shapes without data, for FakeTensor and tracing), and kernels that
advance the version counters of written tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private


def payload_nbytes(shape: Sequence[int | torch.SymInt], dtype: torch.dtype, codec: str) -> int | torch.SymInt:
    """Return the bytes of a payload as C's ``gck_nbytes`` does, also for a symbolic size."""
    sizes = _C.codec_info(codec)["sizes"]
    name = str(dtype).removeprefix("torch.")
    if name not in sizes:
        raise RuntimeError(f"gradckpt: codec {codec!r} does not take {dtype}")
    _, value, group, block, scales, row = sizes[name]
    numel: int | torch.SymInt = math.prod(shape)
    groups, blocks, length = -(-numel // _C.GROUP), -(-numel // _C.BLOCK), shape[-1] if row and len(shape) > 1 else 0
    rows = numel // length if length >= _C.LEAST_ROW and length % _C.GROUP != 0 else 0
    nbytes: int | torch.SymInt = value * numel + (group + scales) * groups + block * blocks + row * rows
    return nbytes


@torch.library.register_fake("gradckpt::encode")  # type: ignore[untyped-decorator]
def _encode(x: torch.Tensor, codec: str) -> torch.Tensor:
    return x.new_empty((payload_nbytes(x.shape, x.dtype, codec),), dtype=torch.uint8)


@torch.library.register_fake("gradckpt::decode")  # type: ignore[untyped-decorator]
def _decode(payload: torch.Tensor, codec: str, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return payload.new_empty(size, dtype=dtype)


@torch.library.register_fake("gradckpt::encode_many")  # type: ignore[untyped-decorator]
def _encode_many(xs: list[torch.Tensor], codec: str) -> list[torch.Tensor]:
    return [_encode(x, codec) for x in xs]


@torch.library.register_fake("gradckpt::decode_many")  # type: ignore[untyped-decorator]
def _decode_many(payloads: list[torch.Tensor], codec: str, out: list[torch.Tensor]) -> None:
    return None


def _decode_many_counted(keys: Any, payloads: list[torch.Tensor], codec: str, out: list[torch.Tensor]) -> None:
    """Advance the version counters of the written tensors, so that autograd refuses earlier saves
    of them.
    """
    torch.autograd.graph.increment_version(out)
    with private.BelowInplace():
        torch.ops.gradckpt.decode_many.default.redispatch(keys & private.after_inplace, payloads, codec, out)


_library = torch.library.Library("gradckpt", "FRAGMENT")  # torch drops the registrations with this object
_library.impl("decode_many", _decode_many_counted, "ADInplaceOrView", with_keyset=True)
