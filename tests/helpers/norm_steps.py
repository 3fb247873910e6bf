"""What the tests of buffers="once" share: a net with every norm, the ways to checkpoint it,
and one step."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import gradckpt
from gradckpt._engine import buffers
from gradckpt._engine.sequential import Segment

RAW = {"codec": "raw", "min_numel": 1}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    torch.manual_seed(0)
    before = [dict(hooks) for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)]
    yield
    assert before == [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    assert not buffers._entered


class Norms(nn.Module):
    """Every kind of norm that keeps statistics, between layers that save tensors."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.flat = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6, momentum=None))
        self.image = nn.ModuleList(
            [nn.BatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True), nn.SyncBatchNorm(2), nn.BatchNorm2d(2)]
        )
        self.plain = nn.InstanceNorm2d(2)
        self.last = nn.Linear(6, 6)

    def forward(self, x, scale=1.0):
        x = self.flat(self.first(x)).view(-1, 2, 3, 1)
        for norm in self.image:
            x = norm(x).sin() + self.plain(x)
        return self.last(x.view(-1, 6)) * scale

    def method(self, x):
        return self(x)


class Caller:
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def decorated(net):
    return gradckpt.checkpoint(compress=RAW)(net.method)


#: name -> what is checkpointed, made from a net: it says itself which module it belongs to
FORMS = {
    "module": lambda net: net,
    "method": lambda net: net.method,
    "forward": lambda net: net.forward,
    "call": lambda net: net.__call__,
    "partial": lambda net: functools.partial(functools.partial(net, scale=2.0), scale=3.0),
    "partial of a method": lambda net: functools.partial(net.forward, scale=2.0),
    "decorated": decorated,
    "segment": lambda net: Segment([nn.Identity(), net]),
}

#: The same, where the module has to be passed.
OPAQUE = {
    "lambda": lambda net: lambda x: net(x),
    "closure over a method": lambda net: lambda x: net.method(x),
    "callable object": lambda net: Caller(net),
    "method of another object": lambda net: Caller(net).__call__,
    "partial of a function": lambda net: functools.partial(lambda m, x: m(x), net),
    "partial of a region": lambda net: functools.partial(gradckpt.checkpoint, net),
    "segment of functions": lambda net: Segment([torch.sin, lambda x: net(x)]),
}


def step(net, function, call, backwards=1):
    """Statistics and gradients after one training step of `function`, run by `call`."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), requires_grad=True)
    loss = call(function, x * 1).square().sum()
    for i in range(backwards):
        loss.backward(retain_graph=i + 1 < backwards)
    return {"x": x.grad, **dict(net.named_buffers()), **{name: p.grad for name, p in net.named_parameters()}}


def plainly(function, *args):
    return function(*args)


def both(make, call, net=None, backwards=1, passed=False):
    """The same step with and without checkpointing, on copies of one net; passed:
    as ``buffers=``."""
    net = net or Norms()
    other = copy.deepcopy(net)
    if passed:
        call = functools.partial(call, buffers=other)
    return step(net, make(net), plainly, backwards), step(other, make(other), call, backwards)


def different(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if (a[name] is None) != (b[name] is None) or not equal(a[name], b[name])]


def equal(a, b):
    return a is None or torch.equal(a, b)
