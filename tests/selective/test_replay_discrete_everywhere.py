"""Routers choose in every recompute as in the forward, with every way to run the regions,
and however deep they are nested."""

import functools
import inspect
import math
import threading

import pytest
import routers
import torch
import torch.nn.functional as F
from routers import WAYS, build, error, fix, gradients, of_way, rerouted
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt
from gradckpt import SelectiveRecompute

CODECS = pytest.mark.parametrize("codec", ["int8", "int4"])
#: float32's own, where nothing was rounded by a codec.
ROUNDING = 1e-6


def check(name, codec, depth, choice, seed=0):
    exact = gradients(build(depth, choice, seed))
    apart = error(of_way(build(depth, choice, seed), name, codec, nested=False), exact)
    built = build(depth, choice, seed)
    nested = error(of_way(built, name, codec), exact)
    assert all(len(router.runs) > 1 for router in built[0]), "every region ran again"
    assert rerouted(built[0]) == 0
    assert nested <= 1.1 * math.sqrt(depth) * apart + ROUNDING
    fix(built)
    assert nested <= 1.05 * error(of_way(built, name, codec), exact) + ROUNDING


#: A reentrant region calls what is inside it without grad.
QUIET = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@QUIET
@CODECS
@pytest.mark.parametrize("name", sorted(WAYS))
def test_routers_choose_as_in_the_forward(name, codec):
    for depth in (1, 3) if codec == "int4" else (2,):
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
def test_replay_discrete_false_counts_for_what_is_inside(codec):
    """And nothing is kept where nothing is approximate."""
    config = gradckpt.CompressionConfig(codec, replay_discrete=False)
    for compress in (config, "raw", None):
        gradckpt.stats.reset()
        built = build(2, "tokens")
        outer = functools.partial(gradckpt.checkpoint, compress=compress)
        plain = functools.partial(functools.partial, gradckpt.checkpoint)
        gradients(built, plain, within=functools.partial(functools.partial, outer))
        assert gradckpt.stats()["discrete_outputs"] == 0
        assert (rerouted(built[0]) > 0) == (compress is config)


# ---- a node, whose forward runs without grad ----


INT8 = gradckpt.CompressionConfig("int8", min_numel=0)
EYE = torch.eye(16)


def _keeps_products(context, op, *args, **kwargs):
    return gradckpt.policies.save(INT8) if op == torch.ops.aten.mm.default else False


NODES = {
    "SelectiveRecompute": lambda f, x: SelectiveRecompute.apply(f, None, x, compress=INT8),
    "SelectiveRecompute by a function": lambda f, x: SelectiveRecompute.apply(
        lambda x: f((x.view(-1, 16) @ EYE).view(x.shape)), _keeps_products, x
    ),
    "reentrant": lambda f, x: gradckpt.checkpoint(
        lambda x: gradckpt.checkpoint(f, x, use_reentrant=True), x, compress=INT8
    ),
    "torch's reentrant": lambda f, x: gradckpt.checkpoint(
        lambda x: torchs_checkpoint(f, x, use_reentrant=True), x, compress=INT8
    ),
}
#: Without grad max_pool1d asks for no indices, and the others for no vectors.
MADE_OF_OTHERS = {
    "pools": lambda x: F.max_pool2d(F.max_pool1d(x, 2).unsqueeze(1), 2).square().sum(),
    "pools, the other way": lambda x: F.max_pool1d(F.max_pool2d(x.unsqueeze(1), 2).squeeze(1), 2).square().sum(),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.mT).square().sum(),
    "svdvals": lambda x: torch.linalg.svdvals(x).square().sum() + torch.linalg.matrix_norm(x, "nuc").sum(),
}


@QUIET
@pytest.mark.parametrize("function", MADE_OF_OTHERS)
@pytest.mark.parametrize("name", NODES)
def test_a_forward_without_grad_may_call_other_operators(name, function):
    """What it did not decide is decided by the recompute."""
    start = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    plain, region = (start.clone().requires_grad_() for _ in range(2))
    MADE_OF_OTHERS[function](plain).backward()
    NODES[name](MADE_OF_OTHERS[function], region * 1).backward()
    assert torch.dist(plain.grad, region.grad) < 0.05 * plain.grad.norm()


def test_a_forward_without_grad_decides_the_other_calls():
    """The pool that has no indices in the forward takes none of those of the next."""
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = []

    def region(x):
        values, index = F.max_pool2d(F.max_pool1d(x, 2).unsqueeze(1), 2, return_indices=True)
        found.append(index)
        return values.sum()

    int4 = gradckpt.CompressionConfig("int4", min_numel=0)
    SelectiveRecompute.apply(region, None, x * 1, compress=int4).backward()
    assert torch.equal(*found)


# ---- torch's checkpoint inside ours ----


def test_nothing_of_torchs_function_is_left_changed():
    stock = inspect.unwrap(getattr(torch.utils.checkpoint, "_checkpoint_impl", torchs_checkpoint))
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
    """While a region of ours runs elsewhere,
    what a thread gets from torch's function is torch's."""
    inside, done, ours = threading.Event(), threading.Event(), []

    def region(h):
        inside.set()
        assert done.wait(20)
        return h.sin()

    def other():
        assert inside.wait(20)
        gradckpt.stats.reset()
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
