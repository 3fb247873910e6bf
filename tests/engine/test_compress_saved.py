"""compress_saved(): what is kept as payloads,
and what stays exact because an error would not be forgiven."""

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from saved_models import (
    EXACT,
    SMALL,
    activation,
    fresh,  # noqa: F401 (a fixture of every test here)
    gpt2,
    gradients,
    llama,
    lstm,
    payload_of,
    resnet,
    watch,
)
from torch import nn

import gradckpt
from gradckpt import compress_saved


@pytest.mark.parametrize("make", [llama, gpt2, resnet, lstm])
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_gradients_are_bit_equal_when_nothing_is_lost(make, codec):
    model, loss_of = make()
    loss, expected = gradients(model, loss_of, contextlib.nullcontext())
    again, got = gradients(model, loss_of, compress_saved({"codec": codec, "min_numel": 16}))
    assert torch.equal(loss, again)
    assert gradckpt.stats()["compressed"] > 0
    assert gradckpt.stats()["live_bytes"] == 0
    assert [n for n in got if not torch.equal(got[n], expected[n])] == []


@pytest.mark.parametrize(
    ("make", "autocast"),
    [(llama, False), (llama, True), (gpt2, False), (gpt2, True), (resnet, False), (resnet, True), (lstm, False)],
)
def test_int8_gradients_are_close(make, autocast):
    model, loss_of = make()
    loss, expected = gradients(model, loss_of, contextlib.nullcontext(), autocast)
    again, got = gradients(model, loss_of, compress_saved(SMALL), autocast)
    assert torch.equal(loss, again)  # the forward is untouched
    flat, exact = (torch.cat([g[n].flatten() for n in expected]) for g in (got, expected))
    assert (flat - exact).norm() < 0.03 * exact.norm()
    cosine = {n: F.cosine_similarity(got[n].flatten(), expected[n].flatten(), 0) for n in expected}
    assert min(cosine.values()) > 0.999, min(cosine, key=cosine.get)


def saved_by(run):
    """What autograd's nodes hold, as our hooks gave it: by the name of the node,
    in the order of the graph."""
    rows, stack, seen = [], [run().grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                raw = getattr(node, name)
                for one in raw if isinstance(raw, tuple) else [raw]:
                    rows.append((node.name(), name.removeprefix("_raw_saved_"), one.data))
        stack.extend(edge[0] for edge in node.next_functions)
    return rows


@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_are_never_encoded(autocast):
    """Straight, transposed, sliced, expanded, and in autocast's copy, from its cache or not."""
    w = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64)

    @compress_saved(SMALL)
    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = F.linear(x, w)  # keeps x only: a user's tensor
            y = F.linear(y, w) + y @ w.t()[:, :64] + y @ w.view(4, 16, 64).flatten(0, 1)
            y = y + (y[None] @ w.to(torch.bfloat16)[None].expand(1, 64, 64).to(y.dtype))[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            y = F.linear(y, w) * w.select(0, 0)
        return y.float().sum()

    rows = saved_by(run)
    weights = [
        data
        for node, name, data in rows
        if (node, name) in {("MmBackward0", "mat2"), ("BmmBackward0", "mat2"), ("MulBackward0", "other")}
    ]
    assert len(weights) >= 6
    assert [data for data in weights if payload_of(data)] == []
    assert gradckpt.stats()["uncompressed"]["leaf"] >= 6
    assert gradckpt.stats()["compressed"] >= 3  # the activations beside them are


def test_a_function_that_hands_out_its_weight_keeps_it_by_reference():
    class HandOut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.view_as(w).detach()

        @staticmethod
        def backward(ctx, g):
            return g

    w = nn.Parameter(torch.randn(64, 64))
    x = activation(64, 64)
    y = compress_saved(SMALL)(lambda: x @ HandOut.apply(w))()
    y.sum().backward()
    assert gradckpt.stats()["uncompressed"] == {"leaf": 1}
    assert gradckpt.stats()["compressed"] == 1


def test_leaves_of_the_user_stay_exact():
    x = torch.randn(64, 64, requires_grad=True)
    y = compress_saved(SMALL)(lambda: (x.sin() * x.view(-1, 64)).sum())()
    assert gradckpt.stats()["encoded"] == 1  # of x.sin()
    y.backward()


# ---- what must not be rounded ----


STATISTICS = {
    "layer_norm": lambda x: F.layer_norm(x, (128,)),
    "group_norm": lambda x: F.group_norm(x.transpose(1, 2), 8),
    "instance_norm": lambda x: F.instance_norm(x),
    "rms_norm": lambda x: F.rms_norm(x, (128,)),
    "rms_norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "std": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(-1),
    "amax": lambda x: x.amax(-1),
    "max": lambda x: x.max(),
    "median": lambda x: x.median(),
    "relu": lambda x: x.relu(),
    "relu_": lambda x: (x * 1).relu_(),
    "relu_ of a view": lambda x: (x * 1).view(-1, 32).relu_() * 2,
    "log_softmax": lambda x: (8 * x).log_softmax(-1),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(4, 32, 4, 32).transpose(1, 2) for _ in range(3))),
    "max_pool": lambda x: F.max_pool2d(x, 2),
}


#: Of these all that is saved, or some of it, is kept as it is; nothing is of the others.
KEPT_EXACT = {
    "group_norm": 2,
    "rms_norm by hand": 2,
    "normalize": 5,
    "std": 4,
    "logsumexp": 2,
    "amax": 2,
    "max": 2,
    "median": 2,
    "relu_ of a view": 1,
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_and_comparisons_stay_exact(name):
    """Gradients are as good as the activations, which rounded statistics or signs would prevent."""
    x = activation(4, 32, 128)
    function = STATISTICS[name]
    weight = torch.randn_like(function(x))
    (expected,) = torch.autograd.grad((function(x) * weight).sum(), x)
    y = compress_saved({"codec": "int8", "min_numel": 1})(function)(x)
    kept = gradckpt.stats()["uncompressed"].get(EXACT, 0)
    assert kept == KEPT_EXACT.get(name, 0) or name == "rms_norm"  # of which torch has several
    if name in ("amax", "logsumexp"):
        assert (gradckpt.stats()["compressed"], gradckpt.stats()["live_bytes"]) == (0, 0)
    (got,) = torch.autograd.grad((y * weight).sum(), x)
    assert (got - expected).norm() < (0.03 if name == "attention" else 0.012) * expected.norm()
    if name in ("amax", "max", "median", "relu", "relu_", "relu_ of a view", "logsumexp", "max_pool"):
        assert torch.equal(got, expected)


def test_a_relu_keeps_one_bit_and_what_follows_its_values():
    x, w = activation(64, 128), nn.Parameter(torch.randn(128, 128))
    y, z = compress_saved(SMALL)(lambda: ((y := x.relu()), y @ w))()
    mask = payload_of(y.grad_fn._raw_saved_result.data)
    values = payload_of(z.grad_fn._raw_saved_self.data)
    assert (mask.codec, mask.nbytes) == ("mask", 64 * 128 // 8)
    assert values.codec == "int8"
    assert torch.equal(y.grad_fn._saved_result, (x > 0).float())


def test_a_relu_that_freed_its_output_does_not_save_it_again():
    x = activation(64, 64)
    with compress_saved(SMALL):
        y = x.relu()
        torch.autograd.grad(y.sum(), x)
        z = F.silu(F.silu(y))
    assert torch.allclose(z.grad_fn.next_functions[0][0]._saved_self, y, atol=0.05)


def test_relu_of_nan_lets_the_gradient_through_as_torch_does():
    x = torch.tensor([[1.0, -1.0, 0.0, float("nan")]]).repeat(8, 8).requires_grad_()
    y = x * 1
    (expected,) = torch.autograd.grad(y.relu().sum(), x, retain_graph=True)
    with compress_saved(SMALL):
        z = y.relu().sum()
    assert torch.equal(torch.autograd.grad(z, x)[0], expected)


def test_log_softmax_is_kept_in_half_precision_once():
    logits = activation(64, 100)
    loss = compress_saved(SMALL)(lambda: F.cross_entropy(logits * 8, torch.randint(0, 100, (64,))))()
    payloads = [payload_of(data) for _, _, data in saved_by(lambda: loss) if payload_of(data)]
    assert {(p.codec, p.nbytes) for p in payloads} == {("fp16", 64 * 100 * 2)}
    assert gradckpt.stats()["encoded"] == 1
    assert gradckpt.stats()["shared"] == 1


def test_values_the_codec_cannot_hold_stay_and_are_counted():
    x = activation(64, 64) * 1e6
    y = x.detach().clone().requires_grad_()
    z = y * 1
    loss = compress_saved({"codec": "fp16", "min_numel": 16})(lambda: z.square().sum())()
    assert gradckpt.stats()["uncompressed"] == {"values the codec cannot hold": 1}
    loss.backward()
    assert torch.equal(y.grad, 2 * y.detach())


@pytest.mark.parametrize("late", [False, True])
def test_late_overflow_hold_nothing_in_a_cycle(late):
    """A device says afterwards that it cannot hold the values:
    the payload then keeps the tensor, not its graph."""
    gradckpt._C.late_overflow(late)
    gc.disable()
    try:
        x = activation(64, 64)
        with compress_saved({"codec": "fp16", "min_numel": 16}):
            y = (x + 20).exp()
        gradckpt._C.settle_overflow()
        gradckpt.stats()
        expected = y.detach().clone()
        (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(got, expected)
        node = watch(y.grad_fn)
        del y
        assert node() is None
    finally:
        gc.enable()
        gradckpt._C.late_overflow(False)


# ---- what is touched not at all ----


def test_integers_complex_sparse_and_subclasses_are_kept_as_they_are():
    class Sub(torch.Tensor):
        pass

    table = nn.Parameter(torch.randn(32, 32))
    index = torch.randint(0, 32, (32, 32))
    z = torch.randn(32, 32, dtype=torch.complex64, requires_grad=True) * 1
    sub = (torch.randn(32, 32).as_subclass(Sub)).requires_grad_() * 1
    sparse = torch.eye(32).to_sparse()
    x = activation(32, 32)
    with compress_saved(SMALL):
        y = F.embedding(index, table).sum() + (z * z).abs().sum() + torch.sparse.mm(sparse, x).sum() + (sub * sub).sum()
    kept = gradckpt.stats()["uncompressed"]
    assert kept["tensor subclass"] == 2
    assert kept["dtype the codec does not take"] >= 2
    assert kept["does not require grad"] >= 1
    assert gradckpt.stats()["compressed"] == 0
    y.backward()


def test_bool_masks_become_mask_payloads():
    x = activation(64, 64)
    keep = torch.rand(64, 64) > 0.5
    expected = torch.autograd.grad(torch.where(keep, x * 2, x).sum(), x)[0]
    with compress_saved(SMALL):
        y = torch.where(keep, x * 2, x).sum()
    assert gradckpt.stats()["live_bytes"] == 64 * 64 // 8
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def test_real_tensors_among_fakes_are_kept():
    x = activation(64, 64)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), compress_saved(SMALL):
        x.sin().cos()
    assert gradckpt.stats()["uncompressed"] == {"tracing, fake or functional mode active": 1, "tensor subclass": 1}


def test_small_ones_and_none():
    x = activation(8, 8)
    with compress_saved("int8"):
        x.sin()
    assert gradckpt.stats()["uncompressed"] == {"smaller than min_numel": 1}
    for nothing in (None, False):
        with compress_saved(nothing):
            x.exp()
        compress_saved(nothing)(torch.exp)(x)
    assert gradckpt.stats()["uncompressed"] == {"smaller than min_numel": 1}
