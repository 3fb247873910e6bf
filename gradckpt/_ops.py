"""Fake implementations of torch.ops.gradckpt: shapes without data, for FakeTensor and tracing."""

from __future__ import annotations

import torch

from gradckpt import _C


def payload_nbytes(numel: int | torch.SymInt, dtype: torch.dtype, codec: str) -> int | torch.SymInt:
    """Bytes of a payload: C's ``gck_nbytes``, also for a symbolic size."""
    sizes = _C.codec_info(codec)["sizes"]
    name = str(dtype).removeprefix("torch.")
    if name not in sizes:
        raise RuntimeError(f"gradckpt: codec {codec!r} does not take {dtype}")
    _, value, group, block = sizes[name]
    return value * numel + group * ((numel + 127) // 128) + block * ((numel + 4095) // 4096)


@torch.library.register_fake("gradckpt::encode")  # type: ignore[untyped-decorator]
def _encode(x: torch.Tensor, codec: str) -> torch.Tensor:
    return x.new_empty((payload_nbytes(x.numel(), x.dtype, codec),), dtype=torch.uint8)


@torch.library.register_fake("gradckpt::decode")  # type: ignore[untyped-decorator]
def _decode(payload: torch.Tensor, codec: str, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return payload.new_empty(size, dtype=dtype)
