"""gradckpt.policies.name and policies.save_named: outputs that the model names are kept."""

import contextlib
import functools
import pickle
import warnings

import pytest
import torch
from selective_ways import key_is_on
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import gradckpt
from gradckpt import policies

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=bias) for bias in (True, False, True))

    def forward(self, x):
        q = gradckpt.policies.name(self.q(x).view(2, 8, 4, 8).transpose(1, 2), "q")
        k = gradckpt.policies.name(self.k(x), "k").view(2, 8, 4, 8).transpose(1, 2)
        v = self.v(x).view(2, 8, 4, 8).transpose(1, 2)
        return gradckpt.policies.name(scaled_dot_product_attention(q, k, v), "a")


def gradients(run, model, x):
    return torch.autograd.grad(run(x).sum(), (x, *model.parameters()))


def recomputed(storage):
    """{operator: for each call, whether the recompute runs it}."""
    return {op: [kept == "recomputed" for kept in calls.values()] for op, calls in storage.items()}


@pytest.fixture
def case():
    model = Attention()
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return model, x, gradients(model, model, x)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("names", [("q",), ("k",), ("a",), ("q", "k"), ("q", "k", "a", "never")])
def test_named_outputs_are_kept_and_the_others_run_again(case, names, pickled):
    model, x, want = case
    policy = policies.save_named(*names)
    policy = pickle.loads(pickle.dumps(policy)) if pickled else policy
    contexts = gradckpt.compat.create_selective_checkpoint_contexts(policy)
    out = gradckpt.checkpoint(model, x, context_fn=lambda: contexts)
    assert recomputed(contexts[0].storage) == {
        aten.addmm.default: ["q" not in names, True],
        aten.mm.default: ["k" not in names],
        ATTENTION: ["a" not in names],
    }
    got = torch.autograd.grad(out.sum(), (x, *model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    got = gradients(lambda x: gradckpt.SelectiveRecompute.apply(model, policy, x), model, x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_name_keeps_only_what_has_it_alive(case):
    """Until it gets a name, an output is known by its memory, and not held."""
    model, x, _ = case
    contexts = gradckpt.compat.create_selective_checkpoint_contexts(policies.save_named("k"))
    seen = []
    forward = model.q.forward
    model.q.forward = lambda x: (seen.append(y := forward(x)), y)[1]
    out = gradckpt.checkpoint(model, x, context_fn=lambda: contexts)
    storage = seen[0].untyped_storage()
    model.q.forward = forward
    seen.clear()
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    del out


def test_compressed(case):
    model, x, want = case
    policy = policies.save_named("q").compressed({"codec": "int8", "min_numel": 1})
    gradckpt.stats.reset()
    got = gradients(lambda x: gradckpt.SelectiveRecompute.apply(model, policy, x), model, x)
    assert gradckpt.stats()["compressed"] == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_with_another_policy(case):
    model, x, want = case
    for policy in (
        policies.save_named("a") | policies.save_matmuls,
        policies.save_matmuls | policies.save_named("a"),
    ):
        contexts = gradckpt.compat.create_selective_checkpoint_contexts(policy)
        out = gradckpt.checkpoint(model, x, context_fn=lambda contexts=contexts: contexts)
        assert not any(again for calls in recomputed(contexts[0].storage).values() for again in calls)
        got = torch.autograd.grad(out.sum(), (x, *model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_under_a_foreign_mode(case):
    model, x, want = case
    contexts = gradckpt.compat.create_selective_checkpoint_contexts(policies.save_named("q", "k"))
    with FlopCounterMode(display=False):
        out = gradckpt.checkpoint(model, x, context_fn=lambda: contexts)
    assert recomputed(contexts[0].storage)[aten.mm.default] == [False]
    got = torch.autograd.grad(out.sum(), (x, *model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_name_does_nothing_elsewhere(case):
    model, x, _ = case
    assert gradckpt.policies.name(x, "x") is x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradckpt.checkpoint(model, x)
        gradckpt.checkpoint(
            model, x, context_fn=functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, [])
        )


@pytest.mark.parametrize("around", [contextlib.nullcontext, functools.partial(FlopCounterMode, display=False)])
def test_a_tensor_that_spares_no_operator(case, around):
    model, x, _ = case
    keep = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, policies.save_named("s"))
    for wrong in (
        lambda x: gradckpt.policies.name(x.sin(), "s"),
        lambda x: gradckpt.policies.name(model.q(x) + 1, "s"),
    ):
        with around(), pytest.raises(ValueError, match=r"name\(x, 's'\) got an x that no matrix product"):
            gradckpt.checkpoint(wrong, x, context_fn=keep)
    with around(), pytest.raises(ValueError, match="got an x that no"):
        gradckpt.checkpoint(lambda x: gradckpt.policies.name(3, "s"), x, context_fn=keep)
    assert not key_is_on()


def test_names_that_never_come_are_reported_once(case):
    model, x, _ = case
    keep = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, policies.save_named("z"))
    with pytest.warns(gradckpt.GradckptInactiveWarning, match=r"save_named\('z'\) kept nothing"):
        gradckpt.checkpoint(model, x, context_fn=keep)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradckpt.checkpoint(model, x, context_fn=keep)


def test_bad_names():
    with pytest.raises(ValueError, match="got no names"):
        policies.save_named()
    with pytest.raises(TypeError, match="a name is a string, not 3"):
        policies.save_named("q", 3)
