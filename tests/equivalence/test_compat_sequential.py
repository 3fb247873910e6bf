"""compat.checkpoint_sequential: torch's function over our regions."""

import pytest
import torch
from behaviours import behaviour, leaf

compat = behaviour(ours=("compat",))


def blocks(run, n=5):
    made = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Dropout(0.3)) for _ in range(n)]
    for i, block in enumerate(made):
        block.register_forward_pre_hook(lambda m, args, i=i: run.log("block", i, torch.is_grad_enabled()))
    return made


def gradients(model):
    return [p.grad for block in model for p in block.parameters()]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@compat
def test_segments(run, segments, reentrant):
    model, x = blocks(run), leaf(2, 3)
    y = run.sequential(model, segments, x, use_reentrant=reentrant)
    y.sum().backward()
    return y, x.grad, gradients(model)


@pytest.mark.parametrize("kind", [torch.nn.Sequential, torch.nn.ModuleList, tuple])
@compat
def test_kinds_of_chain(run, kind):
    model, x = blocks(run, 4), leaf(2, 3)
    chain = torch.nn.Sequential(*model) if kind is torch.nn.Sequential else kind(model)
    run.sequential(chain, 2, x, use_reentrant=False).sum().backward()
    return x.grad, gradients(model)


@compat
def test_plain_functions(run):
    x = leaf(4)
    run.sequential([torch.sin, run.watched(torch.exp), torch.tanh], 3, x, use_reentrant=False).sum().backward()
    return x.grad


@compat
def test_a_module_that_is_in_the_chain_twice(run):
    block, x = blocks(run, 1)[0], leaf(2, 3)
    run.sequential(torch.nn.Sequential(block, torch.nn.Tanh(), block), 2, x, use_reentrant=False).sum().backward()
    return x.grad, gradients([block])


@pytest.mark.parametrize("preserve", [True, False])
@compat
def test_preserve_rng_state(run, preserve):
    model, x = blocks(run), leaf(2, 3)
    run.sequential(model, 2, x, use_reentrant=False, preserve_rng_state=preserve).sum().backward()
    return x.grad, torch.rand(2)


@compat
def test_not_explicit_warns(run):
    model, x = blocks(run), leaf(2, 3)
    run.sequential(model, 2, x).sum().backward()
    return x.grad


@compat
def test_input_without_gradient_warns_when_reentrant(run):
    model = blocks(run)
    return run.sequential(model, 2, torch.randn(2, 3), use_reentrant=True)


@compat
def test_other_keywords_are_refused(run):
    for options in ({"debug": True}, {"a": 1, "b": 2}, {"early_stop": False}):
        with run.error(ValueError, "Unexpected keyword arguments"):
            run.sequential(blocks(run), 2, leaf(2, 3), use_reentrant=False, **options)


@pytest.mark.parametrize("segments", [0, -1, 6, 2.0, "2", None])
@compat
def test_odd_segments(run, segments):
    model, x = blocks(run), leaf(2, 3)
    try:
        run.sequential(model, segments, x, use_reentrant=False).sum().backward()
    except Exception as e:
        run.log("error", e)
    return x.grad, gradients(model)


@compat
def test_empty_chain(run):
    try:
        run.log(run.sequential([], 1, leaf(3), use_reentrant=False))
    except Exception as e:
        run.log("error", e)


@compat
def test_several_or_no_inputs_are_refused(run):
    class Two(torch.nn.Module):
        def forward(self, a, b):
            return a, b

    for call in (
        lambda: run.sequential(torch.nn.Sequential(Two(), Two()), 1, leaf(2), leaf(2), use_reentrant=False),
        lambda: run.sequential(torch.nn.Sequential(Two(), Two()), 1, leaf(2), leaf(2)),
        lambda: run.sequential(torch.nn.Sequential(Two(), Two()), 1),
        lambda: run.sequential(torch.nn.Sequential(Two(), Two()), 1, (leaf(2), leaf(2)), use_reentrant=False),
    ):
        with run.error(TypeError):
            call()


@compat
def test_exception_in_a_segment(run):
    def bad(t):
        raise LookupError("bad segment")

    with run.error(LookupError, "bad segment"):
        run.sequential([torch.sin, bad, torch.exp], 3, leaf(4), use_reentrant=False)
