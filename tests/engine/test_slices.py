"""Arguments of a region that lie in one memory are restored as slices of one buffer."""

import pytest
import torch

import gradckpt
from gradckpt import CompressionConfig

CODECS = ["lossless", "int8"]
T, D = 64, 64


def config(codec):
    return CompressionConfig(codec, min_numel=0)


def restored(make, codec):
    """What the function gets in the forward and in the recompute."""
    seen = []

    def region(*args, **kwargs):
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        seen.append(tensors)
        return sum((i + 2.0) * t.sin().sum() for i, t in enumerate(tensors))

    x = torch.randn(2, T, 3 * D, requires_grad=True)
    given = make(x * 1)
    args, kwargs = (given, {}) if isinstance(given, tuple) else ((), given)
    gradckpt.checkpoint(region, *args, compress=config(codec), **kwargs).backward()
    return seen


def memory(tensors):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


#: How tensors lie in one memory, from (2, T, 3 D).
TOGETHER = {
    "chunks": lambda x: x.chunk(3, -1),
    "heads": lambda x: x.view(2, T, 3, 4, D // 4).permute(2, 0, 3, 1, 4).unbind(0),
    "keywords": lambda x: dict(zip("qkv", x.chunk(3, -1), strict=True)),
    "nested": lambda x: (x[..., :D], {"k": x[..., D : 2 * D], "more": [x[..., 2 * D :]]}),
    "even and odd": lambda x: (x[:, ::2], x[:, 1::2]),
    "from an odd place": lambda x: (x[..., 5:D], x[..., D + 1 :]),
    "a tensor and a part of it": lambda x: (x, x[:, 3:20]),
    "a part and the tensor": lambda x: (x[:, 3:20], x),
    "a tensor and an expansion": lambda x: (x, x[:, :1].expand(2, 8, 3 * D)),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", TOGETHER)
def test_one_buffer_serves_all_slices(name, codec):
    forward, recompute = restored(TOGETHER[name], codec)
    assert len(memory(recompute)) == 1
    assert sum(memory(recompute).values()) <= sum(memory(forward).values())
    first = min(t.data_ptr() for t in forward), min(t.data_ptr() for t in recompute)
    for then, now in zip(forward, recompute, strict=True):
        assert then.data_ptr() - first[0] == now.data_ptr() - first[1]
        assert then.stride() == now.stride()
        assert then.data_ptr() % 64 == now.data_ptr() % 64
        assert torch.equal(then, now) if codec == "lossless" else torch.allclose(then, now, atol=0.1)
        assert now.requires_grad
        assert not now.is_leaf
        assert not now._is_view()


@pytest.mark.parametrize("codec", CODECS)
def test_memories_apart_stay_apart(codec):
    made = lambda x: (x[:1], x[1:], *x.sin().chunk(3, -1))  # noqa: E731
    _, recompute = restored(made, codec)
    assert len(memory(recompute)) == 3
    assert sum(memory(recompute).values()) == 2 * 2 * T * 3 * D * 4


def test_leaves_come_back_as_leaves():
    seen = []

    def region(*parts):
        seen.append(parts)
        return sum(p.sin().sum() for p in parts)

    parts = [p.detach().requires_grad_() for p in torch.randn(4, 3 * D).chunk(3, -1)]
    whole = CompressionConfig("int8", min_numel=0, include="floating")
    gradckpt.checkpoint(region, *parts, compress=whole).backward()
    assert all(p.is_leaf and p.requires_grad and not p._is_view() for p in seen[1])
    assert len(memory(seen[1])) == 1


@pytest.mark.parametrize("codec", CODECS)
def test_a_write_to_a_slice_reaches_no_other(codec):
    def gradient(checkpoint):
        x = torch.randn(2, T, 3 * D, generator=torch.Generator().manual_seed(0), requires_grad=True)

        def region(q, k, v):
            q.mul_(2.0)
            return (q.sin() * k.exp() * v).sum()

        whole = x * 1
        checkpoint(region, whole[..., :D], whole[..., D : 2 * D], whole[..., 2 * D :]).backward()
        return x.grad

    want = gradient(lambda f, *parts: f(*parts))
    got = gradient(lambda f, *parts: gradckpt.checkpoint(f, *parts, compress=config(codec)))
    assert torch.equal(got, want) if codec == "lossless" else (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("codec", CODECS)
def test_slices_in_every_form_of_region(codec):
    """Gradients, twice, also of second order, nested, as one node, under hooks of others."""
    x = torch.randn(2, T, 3 * D, requires_grad=True)
    linear = torch.nn.Linear(D, D)

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(self.linear(q), k, v).tanh()

    attention = Attention()
    compress = config(codec)
    ours = lambda *parts: gradckpt.checkpoint(attention, *parts, compress=compress)  # noqa: E731
    forms = {
        "region": ours,
        "region in a region": lambda *parts: gradckpt.checkpoint(ours, *parts, compress=compress),
        "one node": lambda *parts: gradckpt.SelectiveRecompute.apply(attention, None, *parts, compress=compress),
        "fake_quantize": lambda *parts: gradckpt.checkpoint(
            attention, *parts, compress=CompressionConfig(codec, min_numel=0, fake_quantize=True)
        ),
    }

    def gradients(form, times=1):
        y = form(*(x * 1).chunk(3, -1))
        return [torch.autograd.grad(y.square().sum(), [x, linear.weight], retain_graph=True) for _ in range(times)][-1]

    want = gradients(attention)
    for name, form in forms.items():
        for times in (1, 2) if name != "one node" else (1,):
            for a, b in zip(gradients(form, times), want, strict=True):
                assert torch.equal(a, b) if codec == "lossless" else (a - b).norm() < 0.05 * b.norm(), name
    with torch.autograd.graph.save_on_cpu():
        for a, b in zip(gradients(ours), want, strict=True):
            assert torch.equal(a, b) if codec == "lossless" else (a - b).norm() < 0.05 * b.norm()


def test_a_second_derivative_through_slices():
    x = torch.randn(2, 4, 3 * D, dtype=torch.float32, requires_grad=True)

    def second(checkpoint):
        y = checkpoint(lambda q, k, v: (q * k.sin() * v.exp()).sum(), *(x * 1).chunk(3, -1))
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    def ours(function, *parts):
        return gradckpt.checkpoint(function, *parts, compress=config("lossless"))

    assert torch.equal(second(ours), second(lambda f, *parts: f(*parts)))
