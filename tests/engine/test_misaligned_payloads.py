"""Outer saved-tensor hooks may hand a payload back as a piece of a larger buffer, at any byte of it."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import gradckpt

CODECS = [c for c in gradckpt.codecs.names() if "float32" in gradckpt.codecs.info(c)["dtypes"]]


class CopiesOfBytes(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op is torch.ops.aten.clone.default and args[0].dtype == torch.uint8
        return op(*args, **(kwargs or {}))


def moved(x, offset):
    """A copy of the bytes, `offset` bytes into a buffer."""
    if x.dtype != torch.uint8:
        return x
    buffer = torch.empty(x.numel() + offset, dtype=torch.uint8)
    buffer[offset:] = x
    return buffer[offset:]


def gradient(codec, offset):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with saved_tensors_hooks(lambda t: moved(t, offset), lambda t: t):
        y = gradckpt.checkpoint(torch.sin, x * 1, compress={"codec": codec, "min_numel": 0})
    assert gradckpt.stats()["compressed"] == 1
    with CopiesOfBytes() as copies:
        y.sum().backward()
    return x.grad, copies.count


@pytest.mark.parametrize("codec", CODECS)
def test_misaligned_bytes_are_copied(codec):
    gradckpt.reset_stats()
    want, none = gradient(codec, 0)
    assert none == 0
    for offset in (1, 3, 8, 16):
        gradckpt.reset_stats()
        got, copies = gradient(codec, offset)
        assert torch.equal(got, want)
        assert copies == (offset != 16)


@pytest.mark.parametrize("codec", CODECS)
def test_operators_name_the_error(codec):
    x = torch.randn(1000)
    payload = torch.ops.gradckpt.encode(x, codec)
    want = torch.ops.gradckpt.decode(payload, codec, [1000], torch.float32)
    for offset in (1, 3, 8, 16):
        piece = moved(payload, offset)
        if offset == 16:
            assert torch.equal(torch.ops.gradckpt.decode(piece, codec, [1000], torch.float32), want)
            torch.ops.gradckpt.decode_many([piece], codec, [x])
            assert torch.equal(x, want)
            continue
        with pytest.raises(RuntimeError, match=r"a payload at a multiple of 16 bytes; pass payload.clone\(\)"):
            torch.ops.gradckpt.decode(piece, codec, [1000], torch.float32)
        with pytest.raises(RuntimeError, match=r"a payload at a multiple of 16 bytes; pass payload.clone\(\)"):
            torch.ops.gradckpt.decode_many([payload, piece], codec, [x, torch.empty(1000)])
