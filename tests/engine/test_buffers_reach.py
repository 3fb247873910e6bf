"""A plain function is watched only when it may reach a module with running statistics."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import gradckpt

NORM = nn.BatchNorm1d(6)
HOLDER = types.SimpleNamespace(net=NORM)


def closure(net):
    return lambda x: net(x), ()


def attribute_of_closure(net):
    holder = nn.ModuleDict({"net": net})
    return lambda x: holder["net"](x), ()


def container_in_closure(net):
    nets = {"first": [net]}
    return lambda x: nets["first"][0](x), ()


def object_in_closure(net):
    holder = types.SimpleNamespace(net=net)
    return lambda x: holder.net(x), ()


def default(net):
    return lambda x, net=net: net(x), ()


def keyword_default(net):
    return lambda x, *, net=net: net(x), ()


def function_in_closure(net):
    inner, _ = closure(net)
    return lambda x: inner(x), ()


def function_in_function(net):
    def outer(x):
        def inner():
            return net(x)

        return inner()

    return outer, ()


def method_in_closure(net):
    call = net.forward
    hooked = net.__call__
    return lambda x: hooked(x) + 0 * call.__self__.weight.sum(), ()


def partial_in_closure(net):
    call = functools.partial(net)
    return lambda x: call(x), ()


def argument(net):
    return lambda x, net: net(x), (net,)


def argument_in_container(net):
    return lambda x, nets: nets["net"](x), ({"net": net},)


def global_module(net):
    return lambda x: NORM(x), ()


def global_object(net):
    return lambda x: HOLDER.net(x), ()


def deep(net):
    nest = net
    for _ in range(9):
        nest = [nest]
    return lambda x: nest[0][0][0][0][0][0][0][0][0](x), ()


FORMS = [
    closure, attribute_of_closure, container_in_closure, object_in_closure, default, keyword_default,
    function_in_closure, function_in_function, method_in_closure, partial_in_closure, argument,
    argument_in_container, global_module, global_object, deep,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_statistics_are_updated_once(form):
    NORM.reset_running_stats()
    net = NORM if form in (global_module, global_object) else nn.BatchNorm1d(6)
    function, others = form(net)
    gradckpt.checkpoint(function, torch.randn(8, 6, requires_grad=True), *others).sum().backward()
    assert net.num_batches_tracked == 1


def watched_by(function, *others):
    """How many global hooks there were while the function ran: forward, recompute."""
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append(len(torch_module._global_forward_pre_hooks))
            return x.sin()

    spy = Spy()
    gradckpt.checkpoint(
        lambda x, *rest: spy(function(x, *rest)), torch.randn(8, 6, requires_grad=True), *others
    ).sum().backward()
    return seen


@pytest.mark.parametrize("form", [f for f in FORMS if f not in (global_module, global_object, object_in_closure, deep)])
def test_without_statistics_nothing_is_watched(form):
    function, others = form(nn.LayerNorm(6))
    assert watched_by(function, *others) == [0, 0]


@pytest.mark.parametrize("form", [global_module, global_object, object_in_closure, deep])
def test_what_cannot_be_read_is_watched(form):
    function, others = form(nn.LayerNorm(6))
    assert watched_by(function, *others) == [0, 1]


def test_an_empty_cell_is_watched():
    def outer():
        def region(x):
            return late(x) if x.sum() > 1e9 else x.sin()

        gradckpt.checkpoint(region, torch.randn(3, requires_grad=True)).sum().backward()
        late = nn.Identity()
        return late

    assert outer() is not None
