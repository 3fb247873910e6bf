"""Every draw of a recompute equals the forward's, whatever is replayed before it;
generators end where they should."""

import functools

import pytest
import torch
from drawing_programs import follows_a_kept_draw, program, run
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt

QUIET = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check(seed):
    drawn = program(seed)
    runs, state, grad = run(drawn, seed)
    assert len(runs) > 1, drawn
    assert all(equal(runs[0], again) for again in runs[1:]), (seed, drawn)
    assert torch.equal(state, run(drawn, seed, compress=False)[1]), (seed, drawn)
    assert grad.isfinite().all(), (seed, drawn)
    return follows_a_kept_draw(drawn)


@QUIET
@pytest.mark.filterwarnings("ignore:.*runs again. a backward could mix")
@pytest.mark.parametrize("chunk", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 21))])
def test_random_programs_draw_the_same_twice(chunk):
    assert sum(check(seed) for seed in range(250 * chunk, 250 * chunk + 250)) > 80


def test_a_generator_that_is_not_restored_is_left_alone():
    """preserve_rng_state=False: the recompute draws other numbers, as in torch;
    what follows does not repeat."""
    h = torch.randn(64, 64, requires_grad=True)

    def region(t):
        return t * torch.bernoulli(t.sigmoid())

    torch.manual_seed(0)
    gradckpt.checkpoint(region, h * 1, compress="int8", preserve_rng_state=False).sum().backward()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    region(h)
    assert torch.equal(after, torch.get_rng_state())

    own = torch.Generator().manual_seed(3)

    def with_own(t):
        return t * torch.bernoulli(t.sigmoid(), generator=own)

    out = gradckpt.checkpoint(with_own, h * 1, compress="int8")
    torch.rand(5, generator=own)
    before = own.get_state()
    out.sum().backward()
    assert torch.equal(before, own.get_state())


@pytest.mark.parametrize("checkpoint", [torchs_checkpoint, gradckpt.checkpoint], ids=["torch's", "ours"])
@pytest.mark.parametrize("function", [False, True], ids=["list", "function"])
def test_a_policy_that_keeps_a_random_operator(checkpoint, function):
    """torch's contexts keep the operator and not its generator:
    what the region draws next differs. Ours keep both."""
    masks = []

    def region(t):
        noise = torch.rand_like(t)
        masks.append(torch.nn.functional.dropout(torch.ones_like(t), 0.5))
        return t * noise * masks[-1]

    op = torch.ops.aten.rand_like.default
    policy = (lambda ctx, each, *args, **kwargs: each is op) if function else [op]
    contexts = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, policy)
    h = torch.randn(64, 64, requires_grad=True)
    checkpoint(region, h * 1, use_reentrant=False, context_fn=contexts, early_stop=False).sum().backward()
    assert equal(*([mask] for mask in masks))


def test_states_are_counted():
    h = torch.randn(64, 64, requires_grad=True)
    gradckpt.stats.reset()
    out = gradckpt.checkpoint(lambda t: t * t.softmax(-1).multinomial(1), h * 1, compress="int8")
    stats = gradckpt.stats()
    assert stats["discrete_outputs"] == 1
    assert stats["discrete_bytes"] == 64 + 2 * torch.get_rng_state().nbytes
    out.sum().backward()


@torch.library.custom_op("gradckpt_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """Nothing tells that it draws."""
    return torch.rand_like(x)


def cond_noise(x):
    return torch.cond(torch.tensor(True), torch.rand_like, torch.zeros_like, (x,))


def called_noise(x):
    return gradckpt.policies.region(torch.rand_like, "noise", recompute=False)(x)


UNTAGGED = {
    "an operator of the user's": (noise, torch.ops.gradckpt_tests.noise.default),
    "cond": (cond_noise, torch.ops.higher_order.cond),
    "a kept call": (called_noise, torch.ops.aten.mm.default),
}


@pytest.mark.parametrize("form", ["list", "function"])
@pytest.mark.parametrize("compress", [None, "lossless"])
@pytest.mark.parametrize("name", UNTAGGED)
def test_what_is_kept_of_an_operator_without_a_tag(name, compress, form):
    draw, op = UNTAGGED[name]
    policy = [op] if form == "list" else lambda ctx, called, *args, **kwargs: called is op
    x = torch.ones(64, 64, requires_grad=True)
    out = gradckpt.checkpoint(
        lambda x: torch.nn.functional.dropout(x * draw(x.detach())), x * 1, policy=policy, compress=compress
    )
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(out, x.grad), "the mask of the recompute is the forward's"
    assert torch.equal(torch.get_rng_state(), after)
