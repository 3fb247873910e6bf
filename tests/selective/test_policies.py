"""Policies ready to use; and discrete results, which keep a mixture of
experts on its routes when inputs are compressed."""

import pytest
import torch
import torch.nn.functional as F
from selective_ways import SQUARE, Watch, aten, leaf, same, square
from selective_ways import _nothing_left_behind as _nothing_left_behind

import gradckpt
from gradckpt import policies
from gradckpt._engine.op_policy import Rule

pytestmark = pytest.mark.usefixtures("_nothing_left_behind")
contexts = gradckpt.compat.create_selective_checkpoint_contexts


def run(policy, region, *inputs, **options):
    """Operators of the recompute, what is kept, and the gradients."""
    pair = contexts(policy)
    out = gradckpt.checkpoint(region, *inputs, context_fn=lambda: pair, **options)
    storage = {op: list(found.values()) for op, found in pair[0].storage.items()}
    with Watch() as watch:
        grads = torch.autograd.grad(out.square().sum(), inputs)
    return watch.seen, storage, grads


def want(region, *inputs):
    return torch.autograd.grad(region(*inputs).square().sum(), inputs)


def layer(x, w):
    for _ in range(3):
        x = (x @ w).tanh()
    return torch.addmm(x, x, w).sin().view(2, 8, 16).bmm(w.expand(2, 16, 16)).exp()


def recomputed(region, policy, *inputs):
    """How many times each operator ran again, beside a region that keeps nothing."""
    nothing, some = run([], region, *inputs)[0], run(policy, region, *inputs)[0]
    return {str(op): nothing[op] - some[op] for op in nothing if nothing[op] != some[op]}


# ---- which operators ----


def test_save_matmuls():
    x, w = leaf(16, 16), leaf(16, 16)
    assert recomputed(layer, policies.save_matmuls, x, w) == {
        "aten.mm.default": 3, "aten.addmm.default": 1, "aten.bmm.default": 1,
    }  # fmt: skip
    assert same(run(policies.save_matmuls, layer, x, w)[2], want(layer, x, w))


def test_every_other_matmul():
    x, w = leaf(16, 16), leaf(16, 16)
    _, storage, grads = run(policies.every_other_matmul, layer, x, w)
    kept = {str(op): [type(each).__name__ == "OpOutput" for each in found] for op, found in storage.items()}
    assert kept == {
        "aten.mm.default": [False, True, False], "aten.addmm.default": [True], "aten.bmm.default": [False],
    }  # fmt: skip
    assert same(grads, want(layer, x, w))


def attention(q, k, v):
    return F.scaled_dot_product_attention(q.sin(), k, v, is_causal=True).exp()


@pytest.mark.parametrize(
    "x", [torch.randn(8, 8), torch.randn(()), torch.randn(8, 8).half()], ids=["matrix", "scalar", "half"]
)
@pytest.mark.parametrize("number", [5, 2.5])
def test_an_operator_that_kernels_call_with_a_number(x, number):
    """``torch.remainder(x, 5)`` calls ``remainder.Tensor``. Once a policy names that, it is caught
    in other regions, too."""
    for op, call in (
        (aten.remainder.Tensor, torch.remainder),
        (aten.copysign.Tensor, torch.copysign),
    ):

        def function(t, call=call):
            return call(t, number).sin()

        expected = function(x)
        for policy in ([op], None):
            leaf = x.clone().requires_grad_()
            got = gradckpt.checkpoint(function, leaf * 1, compress="int8", policy=policy)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert torch.equal(got, expected)
            got.sum().backward()
            assert leaf.grad is not None


@pytest.mark.parametrize("codec", [None, "lossless", "int8"])
def test_save_attention(codec):
    """A codec that rounds keeps its output exactly, as its log-sum-exp and its arguments are."""
    q, k, v = leaf(2, 8, 128, 16), leaf(2, 8, 128, 16), leaf(2, 8, 128, 16)
    policy = policies.save_attention if codec is None else policies.save_attention.compressed(codec)
    seen, storage, grads = run(policy, attention, q, k, v)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert seen[op] == 0
    ((out, logsumexp),) = storage[op]
    exact = op(q.sin(), k, v, 0.0, True)
    assert torch.equal(logsumexp.val, exact[1])
    assert getattr(out.val, "codec", None) == (codec if codec == "lossless" else None)
    assert same(grads, want(attention, q, k, v))


def test_operators_of_an_attention_are_all_there():
    names = [str(op) for op in policies.save_attention.rules]
    for name in ("flash_attention.", "flash_attention_for_cpu.", "efficient_attention.", "cudnn_attention."):
        assert f"aten._scaled_dot_product_{name}default" in names


def test_combined():
    both = policies.save_matmuls.compressed("int8") | policies.save_attention
    assert both.rules[aten.mm.default].config.codec == "int8"
    assert both.rules[aten._scaled_dot_product_flash_attention_for_cpu.default].config is None
    assert (both | policies.save_matmuls).rules[aten.mm.default].config is None  # the second counts
    assert (policies.every_other_matmul | policies.save_attention).rules[aten.mm.default].every == 2
    assert repr(both) == "<gradckpt policy: save_matmuls:int8|save_attention>"
    x, w = leaf(16, 16), leaf(16, 16)
    own = policies.save_matmuls | policies.Policy([Rule(SQUARE)])
    assert same(run(own, lambda a, b: square(a @ b), x, w)[2], want(lambda a, b: square(a @ b), x, w))
    with pytest.raises(TypeError):
        policies.save_matmuls | [aten.mm.default]


# ---- discrete results ----


#: The sweep of test_jumps.py has the others.
DISCRETE = {
    "argsort": lambda t: t.argsort(),
    "two tensors": lambda t: t.le(t.flip(0)),
    "searchsorted": lambda t: torch.searchsorted(t[0].sort().values.detach(), t.detach()),
    "cast": lambda t: (t * 1000).long(),
    "cast to bool": lambda t: (t * 1000).round().bool(),
    "bernoulli": lambda t: t.sigmoid().bernoulli(),
    "unique": lambda t: (t.detach() * 100).round().unique(),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", DISCRETE)
def test_a_discrete_result_is_the_same_twice(name, autocast):
    made = []

    def region(t, w):
        result = DISCRETE[name](t @ w if autocast else t)
        made.append(result.clone())
        return (t @ w) * result.float().sum() * 1e-3

    torch.manual_seed(3)
    w = leaf(64, 64)
    with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        torch.randn(64, 64) @ w  # autocast's cast of w is cached by now; in the recompute it is not
        out = gradckpt.checkpoint(region, leaf(64, 64) * 1, w, compress={"codec": "int4", "replay_discrete": "casts"})
    out.float().sum().backward()
    assert len(made) == 2
    assert torch.equal(*made)


def test_casts_are_kept_only_when_asked_for():
    """By default they cost nothing: the kernel that catches them is
    not even registered for the region's sake."""
    made = []

    def region(t):
        made.append((t * 1000).long())
        return t * made[-1]

    gradckpt.stats.reset()
    gradckpt.checkpoint(region, leaf(64, 64) * 1, compress="int4").sum().backward()
    assert not torch.equal(*made)
    assert gradckpt.stats()["discrete_outputs"] == 0
    with pytest.raises(ValueError, match='replay_discrete is True, False or "casts"'):
        gradckpt.CompressionConfig(replay_discrete="all")


def test_what_was_decided_may_be_changed_in_place():
    made = []

    def region(t):
        mask = (t > 0).logical_not_()
        order = t.argsort().add_(1)
        made.append((mask.clone(), order.clone()))
        return t.masked_fill(mask, 0).exp() * order

    y = gradckpt.checkpoint(region, leaf(64, 64) * 1, compress="int4")
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert len(made) == 3
    assert all(same(each, made[0]) for each in made)


def test_discrete_results_under_a_mode_and_with_a_policy():
    made = []

    def region(t, w):
        made.append((t @ w).argsort())
        return (t @ w).sin() * made[-1]

    x, w = leaf(64, 64), leaf(64, 64)
    with Watch():
        gradckpt.checkpoint(region, x * 1, w, compress="int4").sum().backward()
    gradckpt.checkpoint(
        region, x * 1, w, compress="int4", context_fn=lambda: contexts(policies.save_matmuls)
    ).sum().backward()
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[2], made[3])


def test_discrete_results_are_not_kept_where_nothing_is_approximate():
    for compress in (
        None,
        "raw",
        {"codec": "int8", "fake_quantize": True},
        {"codec": "int8", "replay_discrete": False},
    ):
        gradckpt.stats.reset()
        gradckpt.checkpoint(lambda t: t * (t > 0), leaf(64, 64) * 1, compress=compress).sum().backward()
        assert gradckpt.stats()["discrete_outputs"] == 0
    gradckpt.checkpoint(lambda t: t * (t > 0), leaf(64, 64) * 1, compress="int8").sum().backward()
    assert gradckpt.stats()["discrete_outputs"] == 1
    assert gradckpt.stats()["discrete_bytes"] == 64 * 64 // 8  # one bit each
