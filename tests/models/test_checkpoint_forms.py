"""Every form in which torch's checkpoint is called, under each entry point: compressed, however and
whenever the function was decorated.
"""

import functools

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint as early

import gradckpt
from gradckpt import compat

DECORATES = hasattr(torch_checkpoint, "_checkpoint_impl")
needs_decorator = pytest.mark.skipif(not DECORATES, reason="torch's checkpoint is no decorator before 2.14")
WIDTH = 64
weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / 8


def function(x):
    return (x @ weight).tanh().exp()


def forms(checkpoint):
    """The forms of a call, made now."""

    class Layer(nn.Module):
        def forward(self, x):
            return function(x)

    def decorated(wanted):
        return checkpoint(use_reentrant=False)(wanted)

    class Decorated(Layer):
        @checkpoint(use_reentrant=False)
        def forward(self, x):
            return function(x)

    class Static:
        @staticmethod
        @checkpoint(use_reentrant=False)
        def call(x):
            return function(x)

    return {
        "partial": functools.partial(checkpoint, function, use_reentrant=False),
        "function": decorated(function),
        "module": decorated(Layer()),
        "bound method": decorated(Layer().forward),
        "method": Decorated(),
        "static method": Static.call,
    }


class Call:
    def __call__(self, x):
        return early(function, x, use_reentrant=False)


BEFORE = {"call": Call(), **(forms(early) if DECORATES else {})}
COMPAT = forms(compat.checkpoint)


def step(call):
    """The gradient, regions, and compressed tensors."""
    x = torch.linspace(-2, 2, 32 * WIDTH).view(32, WIDTH).requires_grad_()
    before = gradckpt.stats()
    y = call(x * 1)
    now = gradckpt.stats()
    y.sum().backward()
    return x.grad, now["regions"] - before["regions"], now["compressed"] - before["compressed"]


exact, _, _ = step(function)


@pytest.mark.parametrize("form", COMPAT)
def test_compat(form):
    grad, regions, compressed = step(COMPAT[form])
    assert (regions, compressed) == (1, 0)
    assert torch.equal(grad, exact)


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("form", BEFORE)
def test_patched(form, when):
    with gradckpt.patched("int8") as patch:
        call = BEFORE[form] if when == "before" or form == "call" else forms(early)[form]
        grad, regions, compressed = step(call)
    assert (regions, compressed) == (1, 1)
    assert (patch.stats()["calls"], patch.stats()["reentrant"]) == (1, 0)
    assert 0 < (grad - exact).norm() < 0.02 * exact.norm()
    grad, regions, compressed = step(call)
    assert (regions, compressed) == (0, 0)
    assert torch.equal(grad, exact)


@needs_decorator
@pytest.mark.parametrize("compress", [None, "int8"])
def test_patched_leaves_a_decorated_function_its_keywords(compress):
    """Also those that have torch's names."""

    def scaled(x, debug=1, early_stop=1, function=1):
        return (x @ weight).tanh().exp() * (debug * early_stop * function)

    names = {"debug": 2, "early_stop": 3, "function": 5}
    with gradckpt.patched(compress):
        grad, regions, _ = step(functools.partial(early(use_reentrant=False)(scaled), **names))
        with pytest.raises(ValueError, match="debug"):
            step(functools.partial(early(use_reentrant=True)(scaled), **names))
    assert regions == 1
    assert (grad - 30 * exact).norm() < 0.02 * 30 * exact.norm()


@needs_decorator
@pytest.mark.filterwarnings("ignore::gradckpt.GradckptInactiveWarning")  # said once in a process
def test_a_reentrant_decorator_is_left_to_torch():
    with gradckpt.patched("int8") as patch:
        _, regions, _ = step(early(use_reentrant=True)(function))
    assert (regions, patch.stats()["reentrant"]) == (0, 1)


@needs_decorator
def test_decorated_without_an_argument_that_says_how():
    """use_reentrant=None is ours while patched, as in a call; so are torch's other keywords."""
    with gradckpt.patched("int8"):
        assert step(early()(function))[1:] == (1, 1)
        said = early(use_reentrant=False, preserve_rng_state=False, respect_saved_tensors_hooks=False)
        assert step(said(function))[1:] == (1, 1)


@pytest.mark.parametrize("exact_one", [compat.checkpoint, gradckpt.checkpoint], ids=["compat", "ours"])
def test_without_anything_it_is_a_decorator(exact_one):
    assert step(exact_one(None, use_reentrant=False)(function))[1] == 1
    assert step(exact_one(function=None, use_reentrant=False)(function))[1] == 1


def test_compat_refuses_keywords_of_the_function_where_torch_does():
    with pytest.raises(ValueError) as said:
        compat.checkpoint(use_reentrant=False, scale=2)
    if DECORATES:
        with pytest.raises(ValueError) as theirs:
            early(use_reentrant=False, scale=2)
        assert str(said.value) == str(theirs.value)
