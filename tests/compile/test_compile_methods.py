"""Methods under @gradckpt.checkpoint(...), in code that torch.compile compiles."""

import functools
import sys

import pytest
import torch
from compile_cases import Graphs, fresh_dynamo, gradients, leaf, weight  # noqa: F401 (a fixture of every test here)
from torch import nn

import gradckpt

breaking = False


def region(x, y=None):
    if breaking:
        torch._dynamo.graph_break()
    return x.sin() if y is None else x.sin() * y


class Methods(nn.Module):
    """``y`` is optional: a method that loses its ``self`` finds other arguments, and no error."""

    @gradckpt.checkpoint(compress="int8")
    def method(self, x, y=None):
        return region(x, y)

    forward = method

    @gradckpt.checkpoint(compress="int8")
    @staticmethod
    def static(x, y=None):
        return region(x, y)

    @staticmethod
    @gradckpt.checkpoint(compress="int8")
    def static_above(x, y=None):
        return region(x, y)

    @gradckpt.checkpoint(compress="int8")
    @classmethod
    def of_class(cls, x, y=None):
        return region(x, y) if cls is Methods else x

    @classmethod
    @gradckpt.checkpoint(compress="int8")
    def of_class_below(cls, x, y=None):
        return region(x, y)

    partial = gradckpt.checkpoint(compress="int8")(functools.partial(region))


METHODS = {
    "method": lambda m: m.method,
    "forward": lambda m: m,
    "static": lambda m: m.static,
    "static above": lambda m: m.static_above,
    "class": lambda m: m.of_class,
    "class below": lambda m: m.of_class_below,
    "partial": lambda m: m.partial,
    "through the class": lambda m: functools.partial(Methods.method, m),
    "static through the class": lambda m: Methods.static,
}


@pytest.fixture(params=["whole", "broken before", "broken inside"])
def breaks(request, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "breaking", request.param == "broken inside")
    return request.param


def assert_near(got, want):
    assert torch.equal(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("how", METHODS)
def test_decorated_method(how, breaks):
    module = Methods()

    def function(x, y):
        if breaks == "broken before":
            torch._dynamo.graph_break()
        return METHODS[how](module)(x * 2, y * 3) + METHODS[how](module)(x * 2)

    def torchs(x, y):
        def run(*args):
            return torch.utils.checkpoint.checkpoint(region, *args, use_reentrant=False)

        return run(x * 2, y * 3) + run(x * 2)

    inputs = (leaf(32, 64), weight(64)[:32].detach().requires_grad_())
    want, eager = gradients(torchs, *inputs), gradients(function, *inputs)
    graphs, traced = Graphs(), how != "class below"  # Dynamo takes no object for the function of a classmethod
    assert_near(eager, want)
    assert_near(gradients(graphs.compile(function, fullgraph=traced and breaks == "whole"), *inputs), eager)
    assert breaks == "broken inside" or not traced or graphs.payloads


def test_decorated_forward_of_a_compiled_module(breaks):
    module, graphs, x = Methods(), Graphs(), leaf(32, 64)
    want = gradients(lambda x: module(x * 2), x)
    compiled = graphs.compile(module, fullgraph=breaks == "whole")
    assert_near(gradients(lambda x: compiled(x * 2), x), want)
    assert breaks == "broken inside" or graphs.payloads
