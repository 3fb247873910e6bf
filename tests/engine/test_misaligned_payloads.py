"""Outer saved-tensor hooks may hand a payload back as a piece of a larger buffer,
at any byte of it."""

import pytest
import torch
from forms import in_regions, saved
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import gradckpt

#: sparse leaves dense tensors as they are: test_sparse.py.
CODECS = [c for c in gradckpt.codecs.names() if "float32" in gradckpt.codecs.info(c)["dtypes"] and c != "sparse"]


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
    gradckpt.stats.reset()
    want, none = gradient(codec, 0)
    assert none == 0
    for offset in (1, 3, 8, 16):
        gradckpt.stats.reset()
        got, copies = gradient(codec, offset)
        assert torch.equal(got, want)
        has_scales = gradckpt.codecs.info(codec)["sizes"]["float32"][4] > 0
        assert copies == (offset % 16 != 0) + (has_scales and offset % 4 != 0)


WRONG = {
    "dtype": lambda b: b.float(),
    "bits": lambda b: b.to(torch.uint16),
    "sign": lambda b: b.view(torch.int8),
    "dimensions": lambda b: b[None],
    "size": lambda b: b[1:],
    "strides": lambda b: b.repeat_interleave(2)[::2],
    "device": lambda b: b.to("meta"),
    "layout": lambda b: b.to_sparse(),
}


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("use", [in_regions, saved])
def test_bytes_that_hooks_changed_are_refused(change, use):
    gradckpt.stats.reset()
    x = torch.randn(1000, requires_grad=True) * 1
    with saved_tensors_hooks(lambda t: t, lambda t: WRONG[change](t) if t.dtype == torch.uint8 else t):
        y = use(torch.sin, x, {"codec": "raw", "min_numel": 0})
    with pytest.raises(RuntimeError, match=r"an outer saved-tensor hook returned another tensor .*torch.Tensor"):
        y.sum().backward()
    assert gradckpt.stats()["originals_alive"] == 0  # of those that came back


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
