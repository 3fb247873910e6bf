"""gradckpt.policies.region: calls inside a region that do not run again."""

import gc
import itertools
import weakref

import pytest
import torch
from selective_ways import KeptBlock, Plain, X, checkpointed, counter, in_sequence, kept_call, nested, run, ways
from torch import nn

import gradckpt
from gradckpt import policies
from gradckpt._engine import kept_calls

CALLS = counter()
BLOCK, PLAIN = KeptBlock(policies.region, CALLS), Plain(CALLS)
MODULES = (BLOCK, PLAIN)
W = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(5)))


@pytest.fixture(autouse=True)
def _warn_anew():
    kept_calls.warn_runs_again.cache_clear()


def again(function, name="again"):
    return policies.region(function, name, recompute=True)


WAYS = {
    **ways(BLOCK),
    "policy function": checkpointed(BLOCK, policy=lambda ctx, op, *args, **kwargs: "mm" in str(op)),
}


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_it_runs_once(way, backwards):
    if way.startswith(("policy", "debug")) and backwards == 2:
        pytest.skip("a policy's outputs and torch's debug contexts serve one backward, as in torch")
    ran, expected = (run(f, MODULES, CALLS, backwards) for f in (WAYS[way], BLOCK))
    assert ran.equals(expected)
    assert ran.forward == {"kept": 1, "again": 1, "block": 1}
    assert ran.backward == {"block": backwards, "again": backwards}


PARTS = {"plain": PLAIN, "sin": torch.sin, "readers": lambda y: (y + y.detach().mean()) * y.argmax()}
#: nesting -> how often a backward runs the plain part
NESTINGS = {
    "ours(kept(plain))": 0,
    "ours(sin, kept(plain))": 0,
    "ours(kept(plain), sin)": 0,
    "ours(kept(plain), kept(sin))": 0,
    "ours(again(plain))": 1,
    "ours(again(kept(plain), sin))": 0,
    "ours(kept(kept(plain)))": 0,
    "ours(kept(ours(plain)))": 1,
    "ours(kept(ours(kept(plain))))": 0,
    "ours(ours(kept(plain)))": 0,
    "ours(kept(plain), readers)": 0,
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_nestings(nesting):
    names = itertools.count()
    both = nested(nesting, PARTS, ours=checkpointed, again=again, kept=lambda f: kept_call(f, f"call {next(names)}"))
    ran, expected = (run(f, MODULES, CALLS, 2) for f in both)
    assert ran.equals(expected)
    assert ran.forward == expected.forward == {"plain": 1}
    assert ran.backward == ({"plain": 2 * NESTINGS[nesting]} if NESTINGS[nesting] else {})


def views(x):
    """Save the argument itself, a view of it, a part of it, and a value of its own."""
    return x.sin() + x.t().cos().t() + torch.cat([x[1:].exp(), x[:1].exp()]) + (x * 2).cos()


@pytest.mark.parametrize("strides", ["contiguous", "transposed", "expanded", "offset"])
@pytest.mark.parametrize("compress", [None, {"codec": "lossless", "min_numel": 1}])
def test_views_of_arguments(strides, compress):
    base = torch.randn(18, 16, requires_grad=True)
    x = {
        "contiguous": lambda b: b[:16] * 1,
        "transposed": lambda b: (b[:16] * 1).t(),
        "expanded": lambda b: (b[:1] * 1).expand(16, 16),
        "offset": lambda b: (b * 1)[2:],
    }[strides]
    function = in_sequence(lambda x: x @ W, kept_call(views), torch.tanh)
    grads = [
        torch.autograd.grad(f(x(base)).sum(), (base, W))
        for f in (in_sequence(lambda x: x @ W, views, torch.tanh), checkpointed(function, compress=compress))
    ]
    direct = [
        torch.autograd.grad(f(x(base)).sum(), base)
        for f in (views, checkpointed(in_sequence(kept_call(views)), compress=compress))
    ]
    assert all(map(torch.equal, *grads))
    assert all(map(torch.equal, *direct))


#: An argument that the recompute makes; an output behind the last saved tensor.
NOT_KEPT = {
    "argument": lambda x, hold: kept_call(lambda h: h.sin())(hold(x @ W)),
    "output": lambda x, hold: hold(kept_call(lambda h: torch.nn.functional.linear(h, W))(x.sin())) + 1,
}


@pytest.mark.parametrize("which", NOT_KEPT)
def test_what_no_backward_reads_is_not_kept(which):
    held = []

    def hold(t):
        held.append(weakref.ref(t.untyped_storage()))
        return t

    y = gradckpt.checkpoint(lambda x: NOT_KEPT[which](x, hold), X.clone().requires_grad_() * 1)
    gc.collect()
    assert held[0]() is None
    y.sum().backward()


def test_outputs_that_only_kept_calls_read_need_no_recompute():
    ran = []

    def function(x):
        ran.append(x)
        return kept_call(torch.sin, "sin")(kept_call(lambda x: x * 2)(x))

    gradckpt.checkpoint(function, X.clone().requires_grad_()).sum().backward()
    assert len(ran) == 1


def test_compressed_inputs_are_not_held_by_a_kept_call():
    x = X.clone().requires_grad_() * 1
    y = gradckpt.checkpoint(kept_call(lambda x: x.sin()), x, compress={"codec": "int8", "min_numel": 1})
    held = weakref.ref(x)
    del x
    assert held() is None
    y.sum().backward()


def test_containers():
    def inside(pair, *, scale):
        a, b = pair["a"], pair["b"]
        return {"out": [a.sin() * b, (b.cos(), None, "text")], "same": a, "scale": scale}

    def function(a, b):
        out = kept_call(inside)({"a": a @ W, "b": b @ W}, scale=3)
        return (out["out"][0] * out["out"][1][0] * out["same"] * out["scale"]).tanh()

    a, b = (X.clone().requires_grad_() for _ in range(2))
    expected = torch.autograd.grad(function(a, b).sum(), (a, b, W))
    found = torch.autograd.grad(gradckpt.checkpoint(function, a, b).sum(), (a, b, W))
    assert all(map(torch.equal, found, expected))


def test_parts_of_the_graph_one_after_the_other():
    def function(x):
        y = kept_call(lambda x: x.sin())(x @ W)
        return y.exp(), y.cos()

    grads = []
    for f in (function, checkpointed(function)):
        x = X.clone().requires_grad_()
        a, b = f(x)
        a.sum().backward(retain_graph=True)
        b.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_hooks_around_see_what_is_kept():
    seen = []

    def pack(x):
        seen.append(x)
        return x

    function = in_sequence(lambda x: x @ W, kept_call(lambda x: x.sin().exp()))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = gradckpt.checkpoint(function, X.clone().requires_grad_() * 1)
    assert any(torch.equal(x, (X @ W).sin().exp()) for x in seen)
    y.sum().backward()


def test_discrete_operators_are_counted_around_kept_calls():
    def pick(x):
        return x * nn.functional.one_hot(x.argmax(-1), x.shape[-1])

    function = in_sequence(kept_call(lambda x: pick(x) + x), lambda x: (pick(x.roll(1, -1)) @ W).sin())
    grads = []
    for compress in (None, {"codec": "int4", "min_numel": 1}):
        y = gradckpt.checkpoint(function, X.clone().requires_grad_() * 1, compress=compress)
        grads += torch.autograd.grad(y.sum(), W)
    assert torch.equal((grads[0] == 0).all(1), (grads[1] == 0).all(1))


# ---- policies ----


@pytest.mark.parametrize("names", [["again"], ["ag*"], ["other", "a*n"]])
def test_save_named_keeps_calls_that_declare_otherwise(names):
    policy = policies.save_named(*names)
    ran, expected = (run(f, MODULES, CALLS) for f in (checkpointed(BLOCK, policy=policy), BLOCK))
    assert ran.equals(expected)
    assert ran.backward == {"block": 1}


def test_save_named_without_a_match_warns():
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="kept nothing"):
        run(checkpointed(BLOCK, policy=policies.save_named("x*")), MODULES, CALLS)


def test_enable_with_names():
    model = nn.Sequential(BLOCK)
    with gradckpt.enable(model, modules=[BLOCK], policy=policies.save_named("again")):
        ran = run(model, MODULES, CALLS)
    assert ran.equals(run(BLOCK, MODULES, CALLS))
    assert ran.backward == {"block": 1}


# ---- errors ----


def raises(function, match, error=RuntimeError, **options):
    with pytest.raises(error, match=match):
        gradckpt.checkpoint(function, X.clone().requires_grad_() * 1, **options).sum().backward()


def test_errors():
    raises(in_sequence(kept_call(torch.sin), kept_call(torch.cos)), "two calls of this region have the name 'call'")
    raises(in_sequence(kept_call(torch.sin), again(torch.cos, "call")), "two calls of this region have the name 'call'")
    raises(kept_call(again(torch.sin)), "'again' with recompute=True lies in 'call'")
    raises(kept_call(lambda x: x.mul_(2)), "'call' with recompute=False changed an argument in place")
    raises(
        in_sequence(kept_call(torch.tanh), lambda y: y.mul_(2).sin()),
        "modified by an inplace operation|changed in place later",
    )
    # No node saves this one.
    raises(
        in_sequence(kept_call(lambda x: x @ W), lambda y: y.mul_(2).sin()),
        "an output of the call 'call' .* changed in place",
    )
    raises(
        in_sequence(kept_call(lambda x: x @ W), lambda y: y.mul_(2).sin()),
        "an output of the call 'call' .* changed in place",
    )
    raises(kept_call(lambda x: {}["user"]), "user", KeyError)
    raises(kept_call(torch.sin), "needs a graph, which this form of region lacks", use_reentrant=True)
    with pytest.raises(RuntimeError, match="needs a graph"):
        gradckpt.SelectiveRecompute.apply(BLOCK, None, X.clone().requires_grad_())
    policy = policies.save_named("call").compressed("int8")
    raises(again(torch.sin, "call"), "keeps the call 'call' exactly", ValueError, policy=policy)
    for bad in ((1, "name", True), (torch.sin, 1, True), (torch.sin, "name", 1)):
        with pytest.raises(TypeError, match=r"region\(\) got another type"):
            policies.region(bad[0], bad[1], recompute=bad[2])
    with pytest.raises(ValueError, match="empty name"):
        policies.region(torch.sin, "", recompute=True)


def test_saved_tensors_may_not_change_in_place():
    y = gradckpt.checkpoint(kept_call(torch.tanh), X.clone().requires_grad_() * 1)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_kept_call_of_a_region_that_runs_again_warns():
    nested, plain = checkpointed(in_sequence(checkpointed(BLOCK), torch.cos)), in_sequence(BLOCK, torch.cos)
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="runs again"):
        ran = run(nested, MODULES, CALLS)
    assert ran.equals(run(plain, MODULES, CALLS))


def test_outside_of_regions_and_without_grad():
    ran = run(BLOCK, MODULES, CALLS)
    assert ran.forward == {"kept": 1, "again": 1, "block": 1}
    with torch.no_grad():
        gradckpt.checkpoint(in_sequence(kept_call(torch.sin), kept_call(torch.sin)), X)
