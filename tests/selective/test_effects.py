"""Operators with an ordered effect: as often as under selective contexts of the running torch."""

import functools

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

import gradckpt
from gradckpt import compat, policies

MM = torch.ops.aten.mm.default
calls = []


@torch.library.custom_op("gradckpt_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    calls.append(1)
    return x.clone()


noted.register_fake(torch.empty_like)
noted.register_autograd(lambda ctx, grad: grad)
NOTED = torch.ops.gradckpt_tests.noted.default
effects = pytest.importorskip("torch._higher_order_ops.effects")
effects._register_effectful_op(NOTED, effects._EffectType.ORDERED)


def function(x, w):
    return (NOTED((x @ w).sin()) @ w).tanh().exp()


def by_function(other):
    return lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE if op is MM else other


def torchs(policy, *args):
    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def contexts(policy, *args):
    made = functools.partial(compat.create_selective_checkpoint_contexts, policy)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=made)


def ours(policy, *args, **options):
    return gradckpt.checkpoint(function, *args, policy=policy, **options)


def one_node(policy, *args):
    return gradckpt.SelectiveRecompute.apply(function, policy, *args)


def kept(policy, *args):
    return gradckpt.checkpoint(policies.region(function, "call", recompute=False), *args, compress="int8")


def run(way, policy):
    """How often the effect came, and the gradient."""
    x, w = (torch.randn(16, 16, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (0, 1))
    calls.clear()
    way(policy, x * 1, w).sum().backward()
    return len(calls), x.grad


POLICIES = {
    "names": [MM],
    "function": by_function(CheckpointPolicy.PREFER_RECOMPUTE),
    "function that insists": by_function(CheckpointPolicy.MUST_RECOMPUTE),
}
INT8 = {"codec": "int8", "min_numel": 1}
WAYS = {
    "checkpoint": ours,
    "compressed": functools.partial(ours, compress=INT8),
    "contexts in torch's": contexts,
    "one node": one_node,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_as_often_as_with_torch(way, policy):
    wanted, exact = run(torchs, policy)
    found, grad = run(way, policy)
    assert found == wanted
    assert torch.allclose(grad, exact, rtol=0.05, atol=0.05)


def test_a_mapping_may_insist():
    """A policy that is asked for it in words of torch's runs it again, as torch does."""
    wanted, _ = run(torchs, POLICIES["function that insists"])
    policy = {MM: True, NOTED: CheckpointPolicy.MUST_RECOMPUTE}
    assert run(ours, policy)[0] == wanted == 2
    assert run(ours, {MM: True, NOTED: CheckpointPolicy.PREFER_RECOMPUTE})[0] == run(torchs, [MM])[0]


def test_without_a_policy_it_comes_again():
    assert run(lambda policy, *args: gradckpt.checkpoint(function, *args), None)[0] == 2


def test_a_call_that_is_kept_has_its_effect_once():
    assert run(kept, None)[0] == 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_an_effect_counts_from_when_it_is_registered(policy):
    effects._register_effectful_op(NOTED, None)
    try:
        assert run(ours, policy)[0] == run(torchs, policy)[0] == 2
    finally:
        effects._register_effectful_op(NOTED, effects._EffectType.ORDERED)
    assert run(ours, policy)[0] == run(torchs, policy)[0]
