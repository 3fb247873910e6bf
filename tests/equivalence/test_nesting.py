"""Regions in regions: who recomputes when, and what each level saves. And checkpoints, hooks and
kept calls inside one another: right, or they raise where torch's raise."""

import itertools
import random

import pytest
import torch
from behaviours import behaviour, leaf
from nestings import ENDINGS, LEVELS, PROGRAMS, Reference, command, pairs, triples, verdict
from torch.utils.checkpoint import set_checkpoint_early_stop

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
