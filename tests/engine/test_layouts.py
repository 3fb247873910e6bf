"""Restored arguments have the strides of the original, so that torch takes the same kernels and
saves the same operands: with a codec without loss every bit of what a region computes is that of
``compress=None``."""

import copy

import pytest
import torch

import gradckpt
from gradckpt import _C, CompressionConfig

EXACT = ["raw", "lossless"]
ROUNDS = ["int8", "bf16"]


def _windows(x):
    """Overlapping ones, as unfold makes them."""
    return x.reshape(-1).unfold(0, 480, 240)[:4].unflatten(1, (4, 10, 12))


CHANNELS_LAST = torch.channels_last
# From a dense (2, 16, 24, 24) to four dimensions.
LAYOUTS = {
    "contiguous": lambda x: x * 1,
    "channels last": lambda x: x.to(memory_format=CHANNELS_LAST) * 1,
    "slice of channels last": lambda x: x.to(memory_format=CHANNELS_LAST)[:, :8],
    "window of channels last": lambda x: x.to(memory_format=CHANNELS_LAST)[:, :, 2:20, 3:17],
    "one channel": lambda x: x[:, 3:4],
    "one channel of channels last": lambda x: x.to(memory_format=CHANNELS_LAST)[:, 3:4],
    "one image": lambda x: x[1:],
    "every other row": lambda x: x[:, :, ::2],
    "every third column": lambda x: x[..., ::3],
    "transposed": lambda x: x.transpose(2, 3),
    "transposed slice": lambda x: x[:, 2:9].transpose(1, 3),
    "heads of a projection": lambda x: x.reshape(2, 16, 3, 192)[:, :, 1].unflatten(-1, (8, 24)).transpose(1, 2),
    "rows from the second": lambda x: x.reshape(32, 1, 24, 24)[:, :, 1:, 5:],
    "a run from the fourth": lambda x: x.reshape(-1)[3:4611].view(2, 4, 24, 24),
    "expanded": lambda x: x[:, :1].expand(2, 16, 24, 24),
    "expanded twice": lambda x: x[:1, :, :, 1:2].expand(3, 16, 24, 24),
    "expanded slice": lambda x: x[:, :1, :, 4:20].expand(2, 16, 24, 16),
    "overlapping": _windows,
    "ones": lambda x: x[:1, :1, :1, :1],
    "empty": lambda x: x[:, :0].transpose(1, 3),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def given(layout, dtype=torch.float32):
    x = torch.randn(2, 16, 24, 24, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    return x, LAYOUTS[layout](x)


def in_both_runs(layout, config):
    """The input as the forward and as the recompute see it."""
    seen = []

    def region(t):
        seen.append(t.detach())
        return t.sin()

    _, h = given(layout)
    gradckpt.checkpoint(region, h, compress=config).sum().backward()
    return seen


def alignment(x):
    """Kernels begin before an aligned address in another way, so it decides the order of a sum."""
    return x.data_ptr() % 64


FORMATS = (torch.contiguous_format, CHANNELS_LAST)


@layouts
@pytest.mark.parametrize("codec", EXACT + ROUNDS)
def test_the_layout_is_the_originals(layout, codec):
    forward, recompute = in_both_runs(layout, CompressionConfig(codec, min_numel=0))
    assert recompute.stride() == forward.stride()
    for memory_format in FORMATS:
        assert recompute.is_contiguous(memory_format=memory_format) == forward.is_contiguous(
            memory_format=memory_format
        )
    if codec in EXACT:
        assert torch.equal(recompute, forward)
    else:
        assert torch.allclose(recompute, forward, atol=0.1)
    assert alignment(recompute) == alignment(forward)
    assert gradckpt.stats()["encoded"] > 0
    # Only the reach is restored, and not the storage.
    last = sum((n - 1) * s for n, s in zip(recompute.shape, recompute.stride(), strict=True))
    reach = last + 1 if recompute.numel() else 0
    assert recompute.untyped_storage().nbytes() - reach * recompute.element_size() == alignment(recompute)


@layouts
@pytest.mark.parametrize("codec", EXACT)
def test_a_saved_tensor_is_aligned_as_the_original(layout, codec):
    _, h = given(layout)
    with gradckpt.compress_saved(CompressionConfig(codec, min_numel=0)):
        y = h.sin()
    assert alignment(y.grad_fn._saved_self) == alignment(h)


@pytest.mark.parametrize("codec", EXACT + ROUNDS)
def test_a_payload_is_not_larger_for_values_that_share_memory(codec):
    """Each is encoded once, whether a stride is 0 or windows overlap."""

    def payload_bytes(make):
        gradckpt.stats.reset()
        x = make(torch.randn(16, 256, requires_grad=True) * 1)
        gradckpt.checkpoint(torch.sin, x, compress=CompressionConfig(codec, min_numel=0)).sum().backward()
        assert gradckpt.stats()["compressed"] == 1
        return gradckpt.stats()["bytes_out"]

    whole = payload_bytes(lambda x: x)
    assert payload_bytes(lambda x: x[:, None].expand(16, 32, 256)) == whole
    assert payload_bytes(lambda x: x.view(-1).unfold(0, 256, 128)) <= whole
    assert payload_bytes(lambda x: x.view(-1).as_strided((8, 4, 256), (512, 0, 2))) < whole


def test_values_that_overlap_and_leave_holes_stay_exact():
    gradckpt.stats.reset()
    x = (torch.randn(4608, requires_grad=True) * 1).as_strided((31, 256), (128, 2))
    gradckpt.checkpoint(torch.sin, x, compress="int8").sum().backward()
    assert gradckpt.stats()["uncompressed"] == {"not a plain strided tensor with data": 1}


def test_an_expanded_scalar_is_small():
    gradckpt.stats.reset()
    x = (torch.randn((), requires_grad=True) * 1).expand(4096)
    gradckpt.checkpoint(torch.sin, x, compress="int8").sum().backward()
    assert gradckpt.stats()["uncompressed"] == {"smaller than min_numel": 1}


@pytest.mark.parametrize("codec", EXACT)
def test_what_a_user_decodes_has_no_holes(codec):
    decoded = gradckpt.codecs.encode(torch.randn(64, 4096)[:, 5], codec).decode()
    assert decoded.untyped_storage().nbytes() == 64 * 4


#: Slices that are no views for autograd, of which views are saved.
DETACHED = {
    "unsafe_split": lambda x: torch.unsafe_split(x, 31, 0)[1],
    "detach": lambda x: x[1:].detach(),
    "data": lambda x: x[1:].data,
    "deepcopy": lambda x: copy.deepcopy(x.detach()[1:]),
}


@pytest.mark.parametrize("codec", [*EXACT, "int8"])
@pytest.mark.parametrize("form", DETACHED)
def test_views_of_a_slice_that_is_no_view(form, codec):
    """Payloads hold the whole slice; a view of it begins so far from its first value."""
    features, mask = DETACHED[form](torch.randn(62, 61)), DETACHED[form](torch.rand(62, 61).lt(0.5))
    x = torch.randn(61, len(features), requires_grad=True)

    def losses():
        return (x * features.t()).sum(), x.masked_fill(mask.t(), 0).sum()

    want = [torch.autograd.grad(loss, x)[0] for loss in losses()]
    with gradckpt.compress_saved(CompressionConfig(codec, min_numel=0)):
        kept = losses()
    found = [torch.autograd.grad(loss, x)[0] for loss in kept]
    assert torch.equal(found[1], want[1])
    if codec in EXACT:
        assert torch.equal(found[0], want[0])
    else:
        assert (found[0] - want[0]).norm() < 0.05 * want[0].norm()


def test_a_tensor_that_was_moved_is_not_shared():
    config = CompressionConfig("raw", min_numel=0, include="floating")
    buffers, h = torch.randn(2, 1024), torch.zeros(1000).requires_grad_()
    buffers[1, 3:1003] = buffers[0, :1000]
    seen = []

    def region(t):
        seen.append(alignment(t))
        return t.sin()

    outputs = []
    for memory in (buffers[0, :1000], buffers[1, 3:1003]):
        h.data = memory
        outputs.append(gradckpt.checkpoint(region, h, compress=config))
    for y in outputs:
        y.sum().backward()
    assert seen == [0, 12, 0, 12]


class WithHoles(torch.autograd.Function):
    """x, in memory that has more room."""

    @staticmethod
    def forward(ctx, x):
        room = x.new_empty(2 * x.numel()).untyped_storage()
        return x.new_empty(0).set_(room, 0, x.shape, (2 * x.shape[1], 1)).copy_(x)

    @staticmethod
    def backward(ctx, g):
        return g


def test_views_of_a_tensor_with_holes_do_not_share_its_payload():
    """A codec that rounds gives it back without the holes, so they would lie elsewhere."""
    x = torch.randn(64, 64).requires_grad_()

    @gradckpt.compress_saved({"codec": "int8", "min_numel": 0})
    def run():
        whole = WithHoles.apply(x * 1)
        return (whole**2).sum() + (whole[3:20] ** 2).sum()

    (grad,) = torch.autograd.grad(run(), x)
    assert torch.allclose(grad[3:20], 4 * x[3:20], atol=0.2)


@layouts
@pytest.mark.parametrize("codec", ["fp16", "lossless"])
def test_an_original_is_read_in_its_layout(codec, layout):
    """A device reports overflow late. Until then, and after an overflow, restores read the
    original, which may be a slice, or share memory among its values."""
    x = (torch.randn(2, 16, 24, 24, generator=torch.Generator().manual_seed(0)) * 1e6).requires_grad_()
    seen = []

    def region(a, b):
        seen.append((a.detach(), b.detach()))
        return (a.sin() * b.cos()).sum()

    _C.late_overflow(5.0)
    try:
        parts = LAYOUTS[layout](x), LAYOUTS[layout](x)[:1]
        loss = gradckpt.checkpoint(region, *parts, compress=CompressionConfig(codec, min_numel=0))
        loss.backward(retain_graph=True)
        _C.settle_overflow()
        loss.backward()
    finally:
        _C.late_overflow(0)
    for recompute in seen[1:]:
        for then, now in zip(seen[0], recompute, strict=True):
            assert torch.equal(then, now) if codec == "lossless" else torch.allclose(then, now, rtol=1e-3)
            assert then.stride() == now.stride()
