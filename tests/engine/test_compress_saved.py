"""compress_saved(): what is kept as payloads, and what stays exact because an error would not be
forgiven; its pair of hooks, and codecs for single operators."""

import contextlib
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from processes import in_threads
from small_models import (
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
from torch.autograd.graph import saved_tensors_hooks

import gradckpt
from gradckpt import CompressionConfig, compress_saved


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


def pair_block(config):
    return saved_tensors_hooks(*compress_saved(config).hooks)


def counts(*names):
    stats = gradckpt.stats()
    return {name: stats[name] for name in names}


# ---- the pair ----


@pytest.mark.parametrize("make", [llama, resnet])
@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_a_pair_keeps_what_the_block_keeps(make, codec):
    model, loss_of = make()
    config = {"codec": codec, "min_numel": 16}
    _, expected = gradients(model, loss_of, compress_saved(config))
    of_block = counts("encoded", "shared", "bytes_out")
    gradckpt.stats.reset()
    _, got = gradients(model, loss_of, pair_block(config))
    assert counts("encoded", "shared", "bytes_out") == of_block
    # The end of the block settles the tensor that waits, and keeps what shares its storage exactly.
    near = 1e-2 if codec == "int8" else 0
    assert all((got[name] - expected[name]).norm() <= near * expected[name].norm() for name in expected)


def test_a_pair_serves_many_blocks_and_outlives_them():
    pair = compress_saved(SMALL).hooks
    x = torch.randn(64, 64, requires_grad=True)

    def graph():
        with saved_tensors_hooks(*pair):
            return torch.nn.functional.silu((x * 1) @ (x * 2)).mul(x * 3).sum()

    losses = [graph() for _ in range(3)]
    gradients = [torch.autograd.grad(loss, x)[0] for loss in reversed(losses)]
    assert all(torch.equal(gradients[0], other) for other in gradients)
    assert gradckpt.stats()["compressed"] >= 4


def test_threads_share_a_pair():
    pair = compress_saved(SMALL).hooks
    results = {}

    def train(seed):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for _ in range(5):
            with saved_tensors_hooks(*pair):
                h = x * 1
                for _ in range(6):
                    h = torch.nn.functional.silu(h @ (x * 2)) * 0.1
                loss = h.sum()
            results.setdefault(seed, []).append(torch.autograd.grad(loss, x)[0])

    in_threads(*(functools.partial(train, seed % 3) for seed in range(6)))
    for each in results.values():
        assert len(each) == 10
        assert all(torch.equal(each[0], other) for other in each)


def test_of_two_pairs_the_inner_one_counts():
    x = torch.randn(64, 64, requires_grad=True)
    with pair_block("raw"), pair_block(SMALL):
        torch.nn.functional.silu((x * 1) @ (x * 2)).sum()
    assert gradckpt.stats()["codecs"] == {"int8": 2}


def test_no_codec_has_no_pair():
    with pytest.raises(ValueError, match=r"compress_saved\(None\) compresses nothing"):
        compress_saved(None).hooks  # noqa: B018


# ---- codecs for operators ----


def run(config):
    torch.manual_seed(0)
    linear, norm = torch.nn.Linear(128, 128), torch.nn.LayerNorm(128)
    x = torch.randn(64, 128, requires_grad=True)

    @compress_saved(config)
    def forward():
        h = torch.nn.functional.silu(norm(x * 1))
        return torch.softmax(linear(h), -1)[:, 0].sum()

    forward().backward()
    return gradckpt.stats()["codecs"]


def test_only_named_operators_are_compressed():
    assert run({"linear": "int8"}) == {"int8": 1}


def test_each_operator_has_its_codec():
    assert run({"linear": "int4", "norm": "fp8", "activation": "int6"}) == {"int4": 1, "fp8_e4m3": 1, "int6": 1}


def test_operators_override_the_codec_of_the_others():
    everything = run(CompressionConfig("int8"))
    gradckpt.stats.reset()
    changed = run({"codec": "int8", "operators": {"linear": "int4", "norm": None, "softmax": None}})
    assert everything["bf16"] == 1
    assert changed == {"int8": everything["int8"] - 2, "int4": 1}


def test_operators_survive_a_dict():
    config = CompressionConfig("int8", operators={"linear": "fp8", "norm": None})
    assert CompressionConfig.from_dict(config.to_dict()) == config
    assert hash(config) == hash(CompressionConfig.from_dict(config.to_dict()))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: compress_saved("int3"), ValueError, "unknown codec 'int3'"),
        (lambda: compress_saved({"codec": "int8", "fake_quantize": True}), ValueError, "True applies to regions"),
        (lambda: compress_saved({"codec": "int8", "include": "floating"}), ValueError, "arguments of regions"),
        (lambda: compress_saved(torch.sin), TypeError, "compress= takes"),  # the decorator without its parentheses
        (lambda: compress_saved({"linear": None}), ValueError, "names no codec"),
        (lambda: compress_saved({"codec": "int8", "operators": {"mlp": "int8"}}), ValueError, "unknown operator 'mlp'"),
        (lambda: compress_saved({"linear": "int9"}), ValueError, "unknown codec"),
        (lambda: CompressionConfig(operators="linear"), TypeError, "maps operators to codecs"),
        (lambda: CompressionConfig(operators={"norm": None}, stochastic=True), ValueError, "exclude each other"),
        (
            lambda: gradckpt.checkpoint(torch.sin, torch.ones(8, requires_grad=True), compress={"linear": "int8"}),
            ValueError,
            "not to regions",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(make, error, said):
    with pytest.raises(error, match=said) as caught:
        make()
    assert str(caught.value).startswith("gradckpt: ")
