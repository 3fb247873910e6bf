"""Higher order operators of torch in regions and around saved tensors: by every way, gradients are
those of the plain program."""

import importlib
import pickle

import pytest
import selective_ways
import torch
from selective_ways import LOSSY, OPERATORS, WAYS, fault, make, missing, surroundings
from torch._ops import HigherOrderOperator

import gradckpt
from gradckpt import policies

pytestmark = pytest.mark.filterwarnings("ignore:.*runs again. a backward could mix")
WITH_CODECS = [way for way in WAYS if way != "reentrant"]  # which takes none


def check(name, cases):
    if reason := missing(name):
        pytest.skip(reason)
    assert [text for case in cases if (text := fault(name, *case))] == []


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients(name):
    check(name, [*((way, LOSSY) for way in WITH_CODECS), ("reentrant", None), ("save_matmuls", None)])


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_compiled(name):
    if reason := missing(name, compiled=True):
        pytest.skip(reason)
    check(name, [("checkpoint", LOSSY, True), ("save_attention", LOSSY, True)])


@pytest.mark.soak
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_in_every_way(name, compiled):
    if reason := missing(name, compiled):
        pytest.skip(reason)
    cases = [(way, codec, compiled) for codec in (None, "lossless", LOSSY) for way in WITH_CODECS]
    check(name, [*cases, ("reentrant", None, compiled)])


# ---- what is kept


@pytest.mark.parametrize(
    ("policy", "runs"),
    [
        (None, 2),
        ("save_attention", 1),
        (lambda ctx, op, *args, **kwargs: op is torch.ops.higher_order.flex_attention, 1),
    ],
    ids=["none", "save_attention", "a function"],
)
def test_flex_attention_is_kept(monkeypatch, policy, runs):
    if reason := missing("flex_attention"):
        pytest.skip(reason)
    module = importlib.import_module("torch._higher_order_ops.flex_attention")
    kernel, calls = module.math_attention, []

    def counted(*args, **kwargs):
        calls.append(args)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(module, "math_attention", counted)
    with surroundings():
        block, x = selective_ways.OperatorBlock("flex_attention"), torch.ones(16, selective_ways.N, requires_grad=True)
        gradckpt.checkpoint(block, x * 1, policy=policy).sum().backward()
    assert len(calls) == runs


def test_a_policy_with_one_travels():
    again = pickle.loads(pickle.dumps(policies.save_attention))
    assert again.describe() == policies.save_attention.describe()
    assert torch.ops.higher_order.flex_attention in again.rules


def _adds(function, buffer):
    buffer += 1
    return function(buffer)


def _adds_only(function, buffer):
    buffer += 1


WRITING = {"writes": make("gradckpt_tests_writes", _adds), "only writes": make("gradckpt_tests_only", _adds_only)}


@pytest.mark.parametrize("by_key", [True, False], ids=["by key", "by function"])
@pytest.mark.parametrize("op", WRITING.values(), ids=WRITING)
def test_what_writes_runs_again(op, by_key):
    """Although the policy keeps it: the recompute makes the buffer anew."""

    def region(x):
        buffer = torch.zeros(64)
        op(torch.cos, buffer)
        return (x * x) * buffer

    def policy(ctx, op, *args, **kwargs):
        return isinstance(op, HigherOrderOperator)

    x = torch.rand(64, requires_grad=True)
    gradckpt.checkpoint(region, x, policy=[op] if by_key else policy).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_a_product_that_a_kernel_in_python_reshapes_is_kept_or_runs_again():
    """Below autograd a product of a vector is another operator, whose kernel reshapes in place."""
    op = make("gradckpt_tests_vector")
    w = torch.rand(64, 64, requires_grad=True)
    x = torch.rand(64, requires_grad=True)

    def region(x):
        return op(lambda x, w: (x @ w).sin(), x, w)

    want = torch.autograd.grad(region(x).sum(), (x, w))
    got = torch.autograd.grad(gradckpt.checkpoint(region, x, policy="save_matmuls").sum(), (x, w))
    assert all(map(torch.equal, got, want))
