"""Inputs changed between forward and backward: noticed exactly where torch notices it,
in its words."""

import behaviours
import pytest
import torch
from behaviours import behaviour, leaf
from torch.utils.checkpoint import CheckpointError

import gradckpt

CHANGES = {
    "add_": lambda t: t.add_(1),
    "data": lambda t: t.data.add_(1),
    "detach": lambda t: t.detach().zero_(),
    "view": lambda t: t[0].mul_(2),
    "set_data": lambda t: setattr(t, "data", torch.zeros(4, 4)),
    "resize": lambda t: t.detach().resize_(2, 2),
    "set_": lambda t: t.detach().set_(torch.zeros(4, 4)),
    "detach_": lambda t: t.detach_(),
    "requires_grad_": lambda t: t.requires_grad_(not t.requires_grad),
    "grad": lambda t: setattr(t, "grad", torch.ones(t.shape)),
    "numpy": lambda t: t.detach().numpy().fill(0),
}

#: torch goes on with another tensor than the forward had.
NOTICED = [("requires_grad_", "no grad")]


@pytest.mark.parametrize("kind", ["non-leaf", "leaf", "no grad", "view of one"])
@pytest.mark.parametrize("change", CHANGES)
@behaviour
def test_changed_input(run, change, kind):
    if (change, kind) == ("detach_", "non-leaf") and behaviours.SAVES_INPUTS_BY_A_NODE:
        pytest.skip("torch's checkpoint does not notice detach_() of an input")
    if (change, kind) in NOTICED:
        pytest.skip("gradckpt notices it: test_what_torch_does_not_notice_raises")
    x = leaf(4, 4)
    h = {"non-leaf": x * 2, "leaf": x, "no grad": torch.randn(4, 4), "view of one": (x * 2).t()}[kind]
    w = leaf(4, 4)
    y = run.checkpoint(run.watched(lambda t, w: (t @ w).sin().exp()), h, w)
    try:
        with torch.no_grad() if kind == "leaf" else torch.enable_grad():
            CHANGES[change](h)
        y.sum().backward()
    except RuntimeError as e:
        run.log("error", e)
    return x.grad, w.grad


@pytest.mark.parametrize(("change", "kind"), NOTICED)
def test_what_torch_does_not_notice_raises(change, kind):
    x, w = leaf(4, 4), leaf(4, 4)
    h = torch.randn(4, 4) if kind == "no grad" else (x * 2).t()
    y = gradckpt.checkpoint(lambda t, w: (t @ w).sin().exp(), h, w)
    CHANGES[change](h)
    with pytest.raises(CheckpointError, match="saved other tensors than its forward"):
        y.sum().backward()


@behaviour
def test_changed_input_under_anomaly_mode(run):
    x = leaf(4)
    h = x * 2
    with torch.autograd.detect_anomaly():
        y = run.checkpoint(run.watched(lambda t: t.sin().exp()), h)
        h.add_(1)
        with run.error(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()


@behaviour
def test_input_changed_by_the_function_itself(run):
    x = leaf(4)
    h = x * 2
    y = run.checkpoint(run.watched(lambda t: t.mul_(3).sin().exp()), h)
    with run.error(RuntimeError, "modified by an inplace operation"):
        y.sum().backward()


@behaviour
def test_input_that_needs_no_gradient_changed_by_the_function(run):
    x, c = leaf(4), torch.ones(4)
    y = run.checkpoint(run.watched(lambda t, c: (t * c.add_(1)).sin().exp()), x, c)
    with run.error(RuntimeError, "modified by an inplace operation"):
        y.sum().backward()
