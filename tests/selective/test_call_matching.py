"""A recompute gets the kept results of its own calls, also where the forward made others."""

import contextlib
import functools
import itertools

import pytest
import torch
from selective_ways import _nothing_left_behind as _nothing_left_behind
from selective_ways import aten
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt

pytestmark = [
    pytest.mark.usefixtures("_nothing_left_behind"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]
checkpoint, contexts = gradckpt.checkpoint, gradckpt.compat.create_selective_checkpoint_contexts
again = gradckpt.policies.is_recomputing
INT8 = {"codec": "int8", "min_numel": 0}
W = torch.randn(32, 32, generator=torch.Generator().manual_seed(2)) / 6


def keeps_products(ctx, op, *args, **kwargs):
    return op is aten.mm.default


#: The calls between two saved tensors are known.
REGIONS = {
    "checkpoint": functools.partial(checkpoint, compress=INT8),
    "a policy": functools.partial(checkpoint, compress=INT8, policy="save_matmuls"),
    "a function": functools.partial(checkpoint, compress=INT8, policy=keeps_products),
    "without early stop": functools.partial(checkpoint, compress=INT8, early_stop=False),
    "exact products": functools.partial(checkpoint, policy="save_matmuls"),
}
#: Nothing tells how far their recompute is, but the order of its calls.
NODES = {
    "SelectiveRecompute": lambda f, x: gradckpt.SelectiveRecompute.apply(f, None, x, compress=INT8),
    "a node and a function": lambda f, x: gradckpt.SelectiveRecompute.apply(f, keeps_products, x, compress=INT8),
    "reentrant": lambda f, x: checkpoint(lambda x: checkpoint(f, x, use_reentrant=True), x, compress=INT8),
}


def gates(h, notes):
    """Decide by comparisons and products of one kind; the notes are called in places."""
    before, between, after = ({"before": None, "between": None, "after": None} | notes).values()
    h = h * 2
    _ = before and before(h)
    h = torch.where(h > 0.0, h * 3, h.square())
    _ = between and between(h)
    h = (h @ W).sin()
    h = torch.where(h > 0.0, h, h * 0.1)
    h = (h @ W).exp()
    _ = after and after(h)
    return h


def gradient(region, function):
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    region(function, x * 1).sum().backward()
    return x.grad


def noted(region, **notes):
    return gradient(region, lambda x: gates(x, notes))


@pytest.mark.parametrize("name", [*REGIONS, *NODES])
def test_a_call_of_another_kind_is_never_taken_for_one_of_the_forwards(name):
    region = (REGIONS | NODES)[name]
    want = noted(region)
    others = [
        lambda h: h > 1.5,
        lambda h: h[1:] > 0.0,
        lambda h: h.mT > 0.0,
        lambda h: h.double() > 0.0,
        lambda h: h < 0,
    ]
    for place in ("before", "between", "after"):
        for other in others:
            once = {place: lambda h, other=other: None if again() else other(h)}
            assert torch.equal(noted(region, **once), want), place


@pytest.mark.parametrize("name", [*REGIONS, *NODES])
def test_equal_results_are_one(name):
    """The forward compares the same twice, the recompute once."""
    region = (REGIONS | NODES)[name]
    want = noted(region)
    twice = {"before": lambda h: None if again() else h > 0.0}
    if name in NODES:  # the second of the forward's may be the other decision
        with pytest.raises(CheckpointError, match=r"the forward called aten.gt.Scalar alike 3 x and the recompute 2 x"):
            noted(region, **twice)
        return
    assert torch.equal(noted(region, **twice), want)


@pytest.mark.parametrize("name", ["checkpoint", "a policy", "a function", "without early stop", *NODES])
def test_two_calls_that_may_be_meant_raise(name):
    """With results that differ, and nothing saved in between."""

    def function(x):
        h = x * 2
        if not again():
            _ = (1 - h) > 0.0
        return torch.where(h > 0.0, h * 3, h.square()).exp()

    text = r"the forward called aten.gt.Scalar alike 2 x and the recompute 1 x, with other results"
    with pytest.raises(CheckpointError, match=text):
        gradient((REGIONS | NODES)[name], function)


@pytest.mark.parametrize("name", ["exact products", "a policy", "a function"])
def test_two_products_that_may_be_meant_raise(name):
    def function(x):
        h = x * 2
        with torch.no_grad():
            _ = again() or h.sin() @ W
            h2 = h @ W
        return (h * h2).exp()

    with pytest.raises(CheckpointError, match=r"aten.mm.default alike 2 x and the recompute 1 x"):
        gradient(REGIONS[name], function)


@pytest.mark.parametrize("op", [torch.gt, torch.mm])
@pytest.mark.parametrize("name", [*REGIONS, *NODES])
def test_calls_on_arguments_that_change_places_raise(name, op):
    """Equal in number, in what is saved around them, in shapes: another order, or other calls?"""
    other, run = torch.randn(32, 32, generator=torch.Generator().manual_seed(3)), itertools.count()

    def swaps(h):
        with torch.no_grad():
            calls = [lambda: op(h, other), lambda: op(other, h)]
            results = [call() for call in calls] if next(run) == 0 else [call() for call in calls[::-1]][::-1]
        a, b = (result.float() for result in results)
        return h * a + h.square() * b * 3

    if op is torch.mm and name in ("checkpoint", "without early stop", "SelectiveRecompute", "reentrant"):
        gradient((REGIONS | NODES)[name], swaps)  # nothing is kept of it
    elif op is torch.gt and name == "exact products":
        gradient((REGIONS | NODES)[name], swaps)
    else:
        with pytest.raises(CheckpointError, match=r"alike 2 x and the recompute 2 x, .* in one order"):
            gradient((REGIONS | NODES)[name], swaps)


@pytest.mark.parametrize("name", [*REGIONS, *NODES])
def test_a_call_more_than_the_forwards_raises(name):
    """Also where the region's function catches the error."""
    exact = name == "exact products"

    def function(x, caught):
        h = x * 2
        with torch.no_grad():
            gate = (h @ W) if exact else h > 0.0
        if again():
            with contextlib.suppress(RuntimeError) if caught else contextlib.nullcontext(), torch.no_grad():
                (h.sin() @ W) if exact else h.sin() > 0.0
        return (h * gate).exp().sin()

    region = (REGIONS | NODES)[name]
    with pytest.raises(RuntimeError, match=r"encountered during backward,? but not found in storage"):
        gradient(region, lambda x: function(x, False))
    with pytest.raises(CheckpointError, match="alike 1 x and the recompute 2 x"):
        gradient(region, lambda x: function(x, True))


@pytest.mark.parametrize("name", NODES)
def test_the_order_of_a_nodes_calls_tells_them_apart(name):
    def function(x, metrics):
        h = x * 2
        if metrics and not again():
            _ = (1 - h) > 0.0
        h = torch.where(h.argmax(-1, keepdim=True) > 15, h, h.sin())
        h = torch.where(h > 0.0, h, h * 0.1)
        h = h * h.argmin(-1, keepdim=True)
        if metrics and not again():
            _ = h > 0.0
        return h.exp()

    want, got = (gradient(NODES[name], functools.partial(function, metrics=metrics)) for metrics in (False, True))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", [*REGIONS, *NODES])
def test_a_constant_that_comes_from_restored_values_is_the_forwards(name):
    masks = []

    def function(x):
        h = x * 2
        masks.append(h > h.mean().item())
        return torch.where(masks[-1], h, h.sin()).exp()

    gradient((REGIONS | NODES)[name], function)
    assert len(masks) > 1
    assert all(torch.equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("policy", [[aten.mm.default], keeps_products], ids=["names", "function"])
def test_under_torchs_checkpoint_a_stop_explains_calls_that_are_missing(policy, stop):
    def function(x):
        h = (x @ W).sin()
        return (h @ W).sin().mean() + (h @ W.T.contiguous()).mean()

    def region(function, x):
        return torchs_checkpoint(function, x, use_reentrant=False, early_stop=stop, context_fn=lambda: contexts(policy))

    assert torch.equal(gradient(region, function), gradient(lambda f, x: f(x), function))


def test_a_draw_of_the_forward_alone_leaves_the_others():
    def function(x, metrics):
        p = x.sigmoid()
        if metrics and not again():
            torch.bernoulli(p, generator=torch.Generator().manual_seed(3))
        h = p.sin() * torch.bernoulli(p)
        return (h.sin() * torch.bernoulli(p)).exp()

    def run(metrics):
        torch.manual_seed(7)
        return gradient(REGIONS["checkpoint"], functools.partial(function, metrics=metrics))

    assert torch.equal(run(True), run(False))
