"""@gradckpt.checkpoint(...) above functions and methods."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from torch import nn

import gradckpt
from gradckpt import compat
from gradckpt._engine.decorator import Decorated


@gradckpt.checkpoint(early_stop=False)
def region(x, scale=1.0):
    """Sine, exponentiated."""
    return x.sin().exp() * scale


def plain(x):
    return x.cos().exp()


anonymous = gradckpt.checkpoint(preserve_rng_state=False)(plain)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    @gradckpt.checkpoint(compress={"codec": "raw", "min_numel": 1})
    def forward(self, x, scale=1.0):
        """Forward."""
        return self.norm(self.linear(x)) * scale

    @gradckpt.checkpoint(debug=False)
    @staticmethod
    def static(x):
        return x.sin().exp()

    @gradckpt.checkpoint(debug=False)
    @classmethod
    def of_class(cls, x):
        return x.sin().exp() * len(cls.__name__)

    @staticmethod
    @gradckpt.checkpoint(debug=False)
    def inner(x):
        return x.sin().exp()


def regions(call):
    """How many regions a call makes."""
    gradckpt.stats.reset()
    call()
    return gradckpt.stats()["regions"]


def gradient(function):
    x = torch.ones(3, 4, requires_grad=True)
    function(x).sum().backward()
    return x.grad


FORMS = {
    "function": (region, lambda x: x.sin().exp()),
    "applied": (anonymous, lambda x: x.cos().exp()),
    "static": (Layer.static, lambda x: x.sin().exp()),
    "static of an object": (Layer().static, lambda x: x.sin().exp()),
    "inner static": (Layer.inner, lambda x: x.sin().exp()),
    "class method": (Layer.of_class, lambda x: x.sin().exp() * 5),
    "partial": (functools.partial(region, scale=2.0), lambda x: x.sin().exp() * 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_call_is_one_region(form):
    decorated, expected = FORMS[form]
    assert torch.equal(gradient(decorated), gradient(expected))
    assert regions(lambda: decorated(torch.ones(3, 4, requires_grad=True))) == 1


def test_method_is_a_region_of_its_object():
    """Its module is known: running statistics are updated once, without watching calls."""
    torch.manual_seed(0)
    layer = Layer()
    other = copy.deepcopy(layer)
    x = torch.randn(3, 4, requires_grad=True)
    gradckpt.stats.reset()
    layer(x * 1, scale=2.0).square().sum().backward()
    assert gradckpt.stats()["compressed"] == 1
    assert layer.norm.num_batches_tracked == 1
    got, x.grad = x.grad, None
    other.norm(other.linear(x * 1)).mul(2.0).square().sum().backward()
    assert torch.equal(got, x.grad)
    assert torch.equal(layer.norm.running_var, other.norm.running_var)
    assert layer.forward.__self__ is layer


def test_keywords_given_once_are_not_given_again():
    with pytest.raises(TypeError, match="early_stop"):
        region(torch.ones(3), early_stop=True)


def with_our_names(x, debug=1, early_stop=1, use_reentrant=1, function=1, compress=1):
    return (x * debug * early_stop * use_reentrant * function * compress).sin().exp()


class WithOurNames:
    @gradckpt.checkpoint(use_reentrant=False)
    def method(self, x, **kwargs):
        return with_our_names(x, **kwargs)


@pytest.mark.parametrize("checkpoint", [gradckpt.checkpoint, compat.checkpoint])
def test_keywords_of_the_function_may_have_our_names(checkpoint):
    names = {"debug": 2, "early_stop": 3, "use_reentrant": 5, "function": 7, "compress": 11}
    expected = gradient(lambda x: with_our_names(x, **names))
    for decorated in (checkpoint(use_reentrant=False)(with_our_names), WithOurNames().method):
        assert torch.equal(gradient(functools.partial(decorated, **names)), expected)
        assert regions(lambda d=decorated: d(torch.ones(3, 4, requires_grad=True), **names)) == 1


@pytest.mark.parametrize("checkpoint", [gradckpt.checkpoint, compat.checkpoint])
def test_the_reentrant_form_refuses_them(checkpoint):
    with pytest.raises(ValueError, match="debug"):
        checkpoint(use_reentrant=True)(with_our_names)(torch.ones(3, requires_grad=True), debug=2)
    with pytest.warns(UserWarning, match="use_reentrant"), pytest.raises(ValueError, match="debug"):
        checkpoint(use_reentrant=None)(with_our_names)(torch.ones(3, requires_grad=True), debug=2)


def test_it_looks_like_the_function():
    assert (region.__name__, region.__doc__, region.__module__) == ("region", "Sine, exponentiated.", __name__)
    assert list(inspect.signature(region).parameters) == ["x", "scale"]
    assert list(inspect.signature(Layer().forward).parameters) == ["x", "scale"]
    assert Layer().forward.__doc__ == Layer.forward.__doc__ == "Forward."
    assert Layer.forward is Layer.__dict__["forward"]
    assert repr(region).startswith("<checkpoint(early_stop=False) of <function region")
    assert "checkpoint(compress=" in repr(Layer().forward)


def test_methods_of_one_object_are_equal():
    a, b = Layer(), Layer()
    assert a.forward == a.forward
    assert hash(a.forward) == hash(a.forward)
    assert a.forward != b.forward
    assert a.forward != a.of_class


@pytest.mark.parametrize("again", [lambda f: pickle.loads(pickle.dumps(f)), copy.copy, copy.deepcopy])
def test_decorated_functions_are_found_by_name(again):
    assert again(region) is region


@pytest.mark.parametrize("again", [lambda f: pickle.loads(pickle.dumps(f)), copy.copy, copy.deepcopy])
def test_applied_is_rebuilt(again):
    got = again(anonymous)
    assert isinstance(got, Decorated)
    assert got is not anonymous
    assert (got.function, got.options) == (plain, {"preserve_rng_state": False})
    assert regions(lambda: got(torch.ones(3, requires_grad=True))) == 1


@pytest.mark.parametrize("again", [lambda f: pickle.loads(pickle.dumps(f)), copy.deepcopy])
@pytest.mark.parametrize("method", [Layer().forward, Layer.static, Layer.of_class], ids=["method", "static", "class"])
def test_methods_are_pickled_as_methods(method, again):
    got = again(method)
    x = torch.ones(3, 4, requires_grad=True)
    assert torch.equal(got(x), method(x))
    assert regions(lambda: got(x)) == 1


def test_a_module_with_a_decorated_attribute_is_copied():
    layer = nn.Linear(4, 4)
    layer.forward = gradckpt.checkpoint(early_stop=False)(layer.forward)
    other = copy.deepcopy(layer)
    assert other.forward.function.__self__ is other
    x = torch.ones(3, 4, requires_grad=True)
    assert regions(lambda: other(x)) == 1


@pytest.mark.parametrize(("what", "text"), [(nn.Linear, "the class Linear; decorate its method"), (3, "not 3")])
def test_what_cannot_be_decorated(what, text):
    with pytest.raises(TypeError, match=text):
        gradckpt.checkpoint(early_stop=False)(what)


def test_module_object_can_be_decorated():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    call = gradckpt.checkpoint(early_stop=False)(module)
    gradient(call)
    assert module[1].num_batches_tracked == 1
