"""Fake implementations of torch.ops.gradckpt: shapes without data, for FakeTensor and tracing."""

from __future__ import annotations

import torch

from gradckpt import _C

_GROUP = 128


def payload_nbytes(numel: int | torch.SymInt, itemsize: int, codec: str) -> int | torch.SymInt:
    """Bytes of a payload: what the C descriptor's ``nbytes`` says, also for a symbolic size."""
    bits = _C.codec_info(codec)["bits_per_value"]
    if bits == 0:
        return numel * itemsize
    return (numel + _GROUP - 1) // _GROUP * int(bits * _GROUP // 8)


@torch.library.register_fake("gradckpt::encode")  # type: ignore[untyped-decorator]
def _encode(x: torch.Tensor, codec: str) -> torch.Tensor:
    return x.new_empty((payload_nbytes(x.numel(), x.element_size(), codec),), dtype=torch.uint8)


@torch.library.register_fake("gradckpt::decode")  # type: ignore[untyped-decorator]
def _decode(payload: torch.Tensor, codec: str, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return payload.new_empty(size, dtype=dtype)
