"""Regions in regions: who recomputes when, and what each level saves. And checkpoints, hooks and
kept calls inside one another: right, or they raise where torch's raise."""

import itertools
import random

import pytest
import torch
from behaviours import behaviour, leaf
from nestings import ENDINGS, LEVELS, PROGRAMS, Reference, command, pairs, triples, verdict
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, set_checkpoint_early_stop
from torchs_own import saves_inputs_alone


def tower(run, depth, **options):
    """A region in a region in ..., work before and after each inner one."""

    def level(t, d=depth):
        if d == 0:
            return t.sin().exp()
        return run.checkpoint(run.watched(level, f"level {d - 1}"), t.tanh(), d - 1, **options) * t.cos()

    return level


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@behaviour
def test_depth(run, depth, early_stop):
    x = leaf(3)
    y = tower(run, depth, early_stop=early_stop)(x)
    y.sum().backward()
    return y, x.grad


@saves_inputs_alone
@behaviour
def test_inner_inputs_are_saved_by_the_parent_only(run):
    """What hooks outside of everything see: the inputs of the outermost region."""
    x = leaf(3, 3)

    def pack(t):
        run.log("pack", t)
        return t

    def unpack(t):
        run.log("unpack", tuple(t.shape))
        return t

    with saved_tensors_hooks(pack, unpack):
        y = run.checkpoint(lambda t, z: run.checkpoint(torch.sin, t[:1].exp()).cos(), x * 2, torch.zeros(5))
    y.sum().backward()
    return x.grad


@saves_inputs_alone
@behaviour
def test_hooks_between_two_levels(run):
    """Hooks pushed inside a region pack what an inner region keeps as its inputs."""
    x = leaf(3)

    def pack(t):
        run.log("pack", t)
        return t

    def outer(t):
        t = t.exp()
        with saved_tensors_hooks(pack, lambda t: run.log("unpack") or t):
            t = run.checkpoint(run.watched(lambda u: u.sin().cos(), "inner"), t).tanh()
        return t.sigmoid()

    run.checkpoint(run.watched(outer, "outer"), x).sum().backward()
    return x.grad


# ---- backwards inside ----


def grad_twice(t):
    """A function with a gradient of its own inside, so that it may be differentiated again."""
    y = t.sin().exp()
    (g,) = torch.autograd.grad(y.sum(), t, create_graph=True)
    return torch.autograd.grad((g * y).sum(), t, create_graph=True)[0]


def grad_of(fn):
    def wrapped(t):
        with torch.enable_grad():
            return torch.autograd.grad(fn(t).sum(), t, create_graph=True)[0]

    return wrapped


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "fn", [torch.exp, lambda t: t.sin().exp(), grad_twice], ids=["one op", "two ops", "grad inside"]
)
@pytest.mark.parametrize("shape", ["c", "cc", "g c", "c g", "g c g", "g g c", "c g c", "g c g c", "c g c g c"])
@behaviour
def test_compositions_of_checkpoint_and_grad(run, shape, fn, early_stop):
    """Read from the left: checkpoint of grad of checkpoint of ..."""
    x = leaf(2)
    with set_checkpoint_early_stop(early_stop):
        f = run.watched(fn, "function")
        for letter in reversed(shape.replace(" ", "")):
            if letter == "c":
                f = (lambda inner: lambda t: run.checkpoint(inner, t))(run.watched(f, "region"))
            else:
                f = grad_of(f)
        y = f(x)
    y.sum().backward()
    return y, x.grad


@pytest.mark.parametrize("early_stop", [True, False])
@behaviour
def test_backward_inside_and_a_recompute_that_differs(run, early_stop):
    """With early stop off, a backward inside turns the later comparison off."""
    calls = []

    def fn(t):
        calls.append(1)
        y = t.sin().exp()
        torch.autograd.grad(y.sum(), t, retain_graph=True)
        return (t if len(calls) < 3 else t.double()).cos().tanh()

    x = leaf(3)
    y = run.checkpoint(run.watched(fn), x, early_stop=early_stop)
    try:
        y.sum().backward()
    except (RuntimeError, AssertionError) as e:
        run.log("error", e)
    return x.grad


@behaviour
def test_backward_runs_on_the_original_graph(run):
    def fn(t):
        y = t.sin().exp()
        y.register_hook(lambda g: run.log("hook", g))
        return y.cos()

    x = leaf(3)
    y = run.checkpoint(run.watched(lambda t: run.checkpoint(run.watched(fn, "inner"), t), "outer"), x)
    y.sum().backward()
    return x.grad


@behaviour
def test_backward_inside_a_gradient_hook(run):
    a, b = leaf(3), leaf(3)
    loss = run.checkpoint(run.watched(lambda t: t.sin().exp().cos(), "other"), a).sum()

    def hook(grad):
        run.log("hook", grad)
        loss.backward(retain_graph=True)

    def fn(t):
        z = t.exp()
        z.register_hook(hook)
        return z.sin()

    out = run.checkpoint(run.watched(lambda t: run.checkpoint(run.watched(fn, "inner"), t), "outer"), b)
    out.sum().backward()
    return a.grad, b.grad


@behaviour
def test_node_hook_that_differentiates_the_same_region(run):
    x, inside = leaf(3), []
    y = run.checkpoint(run.watched(lambda t: t.sin().exp().cos().tanh()), x)
    loss = y.sum()

    def hook(*_):
        if len(inside) < 2:
            inside.append(None)
            inside[-1] = torch.autograd.grad(loss, x, retain_graph=True)[0]

    handle = y.grad_fn.next_functions[0][0].register_hook(hook)
    loss.backward(retain_graph=True)
    handle.remove()  # the node holds the hook, the hook the graph: a cycle that no collector sees
    return x.grad, inside


# ---- mixtures ----


@saves_inputs_alone
@pytest.mark.parametrize("level", [0, 1])
@behaviour
def test_mismatch_at_one_level(run, level):
    calls = [0, 0]

    def fn(t, here):
        calls[here] += 1
        t = t.sin() if calls[level] == 1 or here != level else t
        return (run.checkpoint(fn, t.tanh(), 1) if here == 0 else t).exp()

    x = leaf(3)
    y = run.checkpoint(fn, x, 0)
    with run.error(CheckpointError):
        y.sum().backward()
    return x.grad


@behaviour
def test_stop_of_an_outer_region_passes_through_the_inner(run):
    """The outer region has all it needs while the inner one is being recomputed for it."""

    class Noted:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            run.log("enter", self.name)

        def __exit__(self, kind, *_):
            run.log("exit", self.name, kind)

    def contexts(name):
        return lambda: (Noted(name + " forward"), Noted(name + " recompute"))

    def outer(t):
        return run.checkpoint(run.watched(torch.sin, "inner"), t.exp(), context_fn=contexts("inner"))

    x = leaf(3)
    run.checkpoint(run.watched(outer, "outer"), x, context_fn=contexts("outer")).sum().backward()
    return x.grad


# ---- the sweep ----

SHARES = 8  # of the triples, each a test
REFERENCE = Reference()
#: Of `make test`: what was wrong once, and one of each level within each kind of region.
CORE = [
    ("None", "torch", "kept"),
    ("None", "saved lossless", "torch"),
    ("torch", "saved lossless", "torch"),
    ("int8", "saved int8", "torch"),
    ("None", "saved lossless"),
    ("int8", "saved int8"),
    ("policy", "saved lossless"),
    ("one node policy", "policy function"),
    *(("None", name) for name in LEVELS),
    *(("int8", name) for name in LEVELS),
    *((name, "kept") for name in LEVELS),
]


def check(nestings):
    """Every program and ending of these; what is wrong, with the command that runs it alone."""
    programs = itertools.product(nestings, PROGRAMS, ENDINGS)
    found = {command(*each): wrong for each in programs if (wrong := verdict(*each, REFERENCE)) is not None}
    assert not found, f"{len(found)} nestings:\n" + "\n".join(f"{name}: {wrong}" for name, wrong in found.items())


def test_levels_alone():
    check([(name,) for name in LEVELS])


def test_nestings_that_were_wrong_once_and_every_level_in_a_region():
    check(CORE)


@pytest.mark.parametrize("outer", LEVELS)
def test_pairs(outer):
    check([levels for levels in pairs() if levels[0] == outer])


def test_some_triples():
    check(random.Random(0).sample(triples(), 60))


@pytest.mark.soak
@pytest.mark.failed_backward
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("outer", LEVELS)
def test_triples(outer, share):
    check([levels for levels in triples() if levels[0] == outer][share::SHARES])
