"""Python code that runs in the middle of the engine: hooks,
checks and unpack functions that come back to it."""

import functools
import gc
import os
import sys
import threading

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from processes import alone
from test_processes import grad_of, leaf
from test_threads import BOTH, CHECKPOINTS, _nothing_left_behind  # noqa: F401
from torch.autograd.graph import saved_tensors_hooks

import gradckpt


def test_backwards_nested_deeper_than_one_thread_goes():
    """From depth 60 on, torch runs a nested backward on another thread. After that no child of
    its process has a backward, which other tests need."""
    alone(nest_deeply)


def nest_deeply():
    threads = set()

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.save_for_backward(x)
            ctx.depth = depth
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return grad * grad_of(functools.partial(chain, ctx.depth - 1), x), None

    def chain(depth, t):
        return gradckpt.checkpoint(lambda u: Inner.apply(u.cos(), depth).sin() if depth else u.cos().sin(), t)

    x = leaf(2) * 1e-3
    assert torch.isfinite(grad_of(functools.partial(chain, 70), x)).all()
    assert len(threads) > 1


def test_check_of_the_users_own_that_differentiates_through_the_region_it_checks(monkeypatch):
    """The table that is being checked stays, however many others come and go."""
    x, arm = leaf(8), []

    def check(t):
        if arm:
            arm.clear()
            for _ in range(40):
                assert torch.equal(torch.autograd.grad(other, x, retain_graph=True)[0], want[1])
        return tuple(t.shape)

    monkeypatch.setitem(torch_checkpoint._allowed_determinism_checks_to_fns, "own", check)
    want = [grad_of(lambda t: t.sin().exp(), x), grad_of(lambda t: t.cos().exp(), x)]
    y, z = gradckpt.checkpoint(lambda t: (t.sin().exp(), t.cos().exp()), x, determinism_check="own")
    other = z.sum()
    for _ in range(2):
        arm.append(1)
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], want[0])


@pytest.mark.parametrize("when", ["pack", "unpack"])
def test_arguments_that_someone_finds_half_put_together(when):
    """A tuple that gc shows to others cannot be filled any more."""
    kept, armed = [], []

    def look(now, t):
        if now == when and armed:
            kept.append([o for o in gc.get_objects() if type(o) is tuple and len(o) == 3])
        return t

    a, b, c = leaf(4), leaf(4), leaf(4)
    gc.collect()
    gc.freeze()  # only what is made from here on
    try:
        armed.append(1)
        with saved_tensors_hooks(functools.partial(look, "pack"), functools.partial(look, "unpack")):
            y = gradckpt.checkpoint(lambda p, q, r: (p * q).sin() * r, a * 1, b * 1, c * 1)
        y.sum().backward()
    finally:
        gc.unfreeze()
    assert kept
    assert torch.equal(c.grad, (a * b).sin())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    os._exit(0)  # the engine's threads may still be putting objects away
