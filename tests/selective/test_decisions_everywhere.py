"""Routers choose in every recompute as in the forward, whoever runs the regions, and however deep they are nested."""

import functools
import math
import threading

import pytest
import routers
import torch
from routers import WAYS, build, error, fix, gradients, of_way, rerouted
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt

CODECS = pytest.mark.parametrize("codec", ["int8", "int4"])


def check(name, codec, depth, choice, seed=0):
    exact = gradients(build(depth, choice, seed))
    apart = error(of_way(build(depth, choice, seed), name, codec, nested=False), exact)
    built = build(depth, choice, seed)
    nested = error(of_way(built, name, codec), exact)
    assert all(len(router.runs) > 1 for router in built[0]), "every region ran again"
    assert rerouted(built[0]) == 0
    assert nested <= 1.1 * math.sqrt(depth) * apart
    fix(built)
    assert nested <= 1.05 * error(of_way(built, name, codec), exact)


#: A reentrant region calls what is inside it without grad.
QUIET = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@QUIET
@CODECS
@pytest.mark.parametrize("name", sorted(WAYS))
def test_routers_choose_as_in_the_forward(name, codec):
    for depth in (1, 2, 3) if codec == "int4" else (2,):
        check(name, codec, depth, "tokens" if depth < 3 else "experts")


@QUIET
@pytest.mark.soak
@CODECS
@pytest.mark.parametrize("name", sorted(WAYS))
def test_routers_choose_as_in_the_forward_many(name, codec):
    for seed in range(1, 6):
        for depth in (1, 2, 3):
            for choice in ("tokens", "experts"):
                check(name, codec, depth, choice, seed)


@CODECS
def test_decisions_false_counts_for_what_is_inside(codec):
    """And nothing is kept where nothing is approximate."""
    config = gradckpt.CompressionConfig(codec, decisions=False)
    for compress in (config, "raw", None):
        gradckpt.reset_stats()
        built = build(2, "tokens")
        outer = functools.partial(gradckpt.checkpoint, compress=compress)
        plain = functools.partial(functools.partial, gradckpt.checkpoint)
        gradients(built, plain, within=functools.partial(functools.partial, outer))
        assert gradckpt.stats()["decisions"] == 0
        assert (rerouted(built[0]) > 0) == (compress is config)


# ---- torch's checkpoint inside ours ----


def test_nothing_of_torchs_function_is_left_changed():
    stock = torchs_checkpoint.__wrapped__ if hasattr(torchs_checkpoint, "__wrapped__") else torchs_checkpoint
    code, seen = stock.__code__, []

    def region(h):
        seen.append(stock.__code__ is code)
        return torchs_checkpoint(torch.sin, h, use_reentrant=False)

    h = torch.randn(64, 64, requires_grad=True)
    gradckpt.checkpoint(region, h * 1, compress="int8", early_stop=False).sum().backward()
    assert seen == [False, False]
    assert stock.__code__ is code
    with pytest.raises(ZeroDivisionError):
        gradckpt.checkpoint(lambda h: 1 / 0, h * 1, compress="int8")
    assert stock.__code__ is code
    with gradckpt.patched("int8"):
        torchs_checkpoint(region, h * 1, use_reentrant=False).sum().backward()
        assert stock.__code__ is not code
    assert stock.__code__ is code
    gradckpt.checkpoint(region, h * 1).sum().backward()
    assert seen[-1]


def test_another_thread_calls_torchs_own():
    """While a region of ours runs elsewhere, what a thread gets from torch's function is torch's."""
    inside, done, ours = threading.Event(), threading.Event(), []

    def region(h):
        inside.set()
        assert done.wait(20)
        return h.sin()

    def other():
        assert inside.wait(20)
        gradckpt.reset_stats()
        x = torch.randn(8, 8, requires_grad=True)
        torchs_checkpoint(torch.exp, x * 1, use_reentrant=False).sum().backward()
        ours.append(gradckpt.stats()["regions"])
        assert torch.equal(x.grad, x.exp())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    h = torch.randn(64, 64, requires_grad=True)
    out = gradckpt.checkpoint(region, h * 1, compress="int8")
    thread.join()
    out.sum().backward()
    assert ours == [0]


def test_the_grid_of_ways_is_whole():
    assert len(WAYS) >= 20
    assert routers.TOKENS % routers.EXPERTS == 0
