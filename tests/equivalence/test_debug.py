"""debug=True and set_checkpoint_debug_enabled: the operator log in the error."""

import re

import pytest
import torch
from _pytest.logging import LogCaptureHandler
from behaviours import behaviour, leaf
from torch.utils.checkpoint import CheckpointError, set_checkpoint_debug_enabled


@pytest.fixture(autouse=True)
def _no_log_handlers(monkeypatch):
    """The logging mode behind debug=True logs tensors in a way that
    pytest's own handler cannot format."""
    monkeypatch.setattr(LogCaptureHandler, "handleError", lambda self, record: None)


def fails(run, first, again, enabled=None, **options):
    """The text of the error, without the stack traces,
    whose lines are those of each implementation."""
    functions = iter([first] + [again] * 3)
    with set_checkpoint_debug_enabled(enabled):
        y = run.checkpoint(run.watched(lambda t: next(functions)(t)), leaf(4, 4), **options)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    text = str(caught.value)
    run.log(re.sub(r"(?m)^(?!\$).*:\d+:.*\n", "", text))
    run.log("this file" if __file__ in text else "no traces")
    run.log(caught.value.__cause__)


DIFFERENT = {
    "fewer": (lambda t: t.sin().exp().tanh(), lambda t: t.sin() + 1, {}),
    "more": (lambda t: t.sin().exp(), lambda t: t.sin().exp().tanh(), {"early_stop": False}),
    "shapes": (lambda t: (t @ t).exp().sin(), lambda t: (t @ t[:, :2]).exp().sin(), {}),
    "in place and constants": (lambda t: (t * 2).add_(1).exp().view(-1).sin(), lambda t: (t * 2).exp(), {}),
}


@pytest.mark.parametrize("name", DIFFERENT)
@behaviour
def test_log_when_saved_tensors_differ(run, name):
    first, again, options = DIFFERENT[name]
    fails(run, first, again, debug=True, **options)


@pytest.mark.parametrize("argument", [True, False])
@pytest.mark.parametrize("enabled", [True, False, None])
@behaviour
def test_context_manager_beats_the_argument(run, enabled, argument):
    fails(run, lambda t: t.sin().exp().tanh(), lambda t: t.sin() + 1, enabled=enabled, debug=argument)


@behaviour
def test_context_managers_nest_and_count_at_the_forward(run):
    with set_checkpoint_debug_enabled(True):
        fails(run, lambda t: t.sin().exp(), lambda t: t + 1, enabled=False)
        fails(run, lambda t: t.sin().exp(), lambda t: t + 1, enabled=None)
    y = run.checkpoint(lambda t: t.sin().exp(), leaf(4))
    with set_checkpoint_debug_enabled(True):
        y.sum().backward()


@behaviour
def test_debug_changes_no_result(run):
    x = leaf(4, 4)
    y = run.checkpoint(run.watched(lambda t: torch.nn.functional.dropout(t @ t).sin()), x, debug=True)
    y.sum().backward()
    return y, x.grad, torch.rand(2)


@behaviour
def test_debug_serves_one_backward(run):
    """The contexts that log can be entered once."""
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: t.sin().exp()), x, debug=True)
    y.sum().backward(retain_graph=True)
    with run.error(AttributeError):
        y.sum().backward()
    return x.grad


@behaviour
def test_debug_with_grad_off(run):
    with torch.no_grad():
        return run.checkpoint(run.watched(torch.sin), leaf(4), debug=True)


@behaviour
def test_other_exceptions_pass_by_the_log(run):
    calls = []

    def fn(t):
        calls.append(1)
        if len(calls) == 2:
            raise LookupError("mine")
        return t.sin().exp()

    y = run.checkpoint(fn, leaf(4), debug=True)
    with run.error(LookupError, "mine"):
        y.sum().backward()


@behaviour
def test_unpacked_twice_is_logged_too(run):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t.exp()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0] * ctx.saved_tensors[0]

    y = run.checkpoint(lambda t: Twice.apply(t.sin()), leaf(4), debug=True)
    with pytest.raises(CheckpointError, match="An error happened while unpacking tensors") as caught:
        y.sum().backward()
    run.log(caught.value.__cause__)


@behaviour
def test_debug_of_nested_regions(run):
    def outer(t):
        return run.checkpoint(run.watched(lambda u: u.sin().exp(), "inner"), t.tanh(), debug=True).cos()

    x = leaf(4)
    run.checkpoint(run.watched(outer, "outer"), x).sum().backward()
    return x.grad
